"""What the modules of a GPT model allocate: attention (grouped queries, latent), dense MLP, experts, prediction layers,
embedding and loss, on Transformer Engine."""
