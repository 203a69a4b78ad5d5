"""What the modules of a GPT model allocate: dense layers with grouped-query attention on Transformer Engine."""
