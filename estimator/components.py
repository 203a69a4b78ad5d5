"""The names under which live bytes are reported. A closed list: clients show them, calibration corrects by them."""

from __future__ import annotations

PARAMETERS = "parameters"
MAIN_PARAMETERS = "main_parameters"
MAIN_GRADIENTS = "main_gradients"
OPTIMIZER_STATES = "optimizer_states"
GATHERED_PARAMETERS = "gathered_parameters"
GRADIENT_BUCKETS = "gradient_buckets"
WEIGHT_GRADIENTS = "weight_gradients"
ATTENTION = "activations_attention"
MLP = "activations_mlp"
EXPERTS = "activations_experts"
ROUTER = "activations_router"
NORMS = "activations_norms"
RESIDUAL = "activations_residual"
LOGITS = "logits_and_loss"
ACTIVATION_GRADIENTS = "activation_gradients"
BATCH = "batch"
OPTIMIZER_TEMPORARIES = "optimizer_temporaries"
WGRAD_DUMMIES = "fused_gradient_placeholders"
WORKSPACES = "library_workspaces"
FP8_WEIGHTS = "fp8_weight_copies"
CALIBRATION = "calibration"

ACTIVATIONS = (ATTENTION, MLP, EXPERTS, ROUTER, NORMS, RESIDUAL)
STATES = (PARAMETERS, MAIN_PARAMETERS, MAIN_GRADIENTS, OPTIMIZER_STATES)

MEANING = {
    PARAMETERS: "model weights in the compute dtype",
    MAIN_PARAMETERS: "FP32 main weights of the optimizer",
    MAIN_GRADIENTS: "gradient buffers that accumulate over microbatches",
    OPTIMIZER_STATES: "Adam moments",
    GATHERED_PARAMETERS: "weights that FSDP has gathered for use",
    GRADIENT_BUCKETS: "unsharded gradients waiting for their reduce-scatter",
    WEIGHT_GRADIENTS: "gradients of weights before they are added to the gradient buffer",
    ATTENTION: "saved and temporary tensors of attention",
    MLP: "saved and temporary tensors of the MLP",
    EXPERTS: "tokens sent to experts, what experts save, shared experts",
    ROUTER: "routing probabilities and maps",
    NORMS: "outputs and statistics of the norms",
    RESIDUAL: "the residual stream between layers",
    LOGITS: "logits, cross entropy and the loss",
    ACTIVATION_GRADIENTS: "gradients of activations in backward",
    BATCH: "tokens, labels, mask and positions",
    OPTIMIZER_TEMPORARIES: "copies made inside the optimizer step or while it is built",
    WGRAD_DUMMIES: "placeholders that Transformer Engine returns where the gradient was added in place",
    FP8_WEIGHTS: "FP8 copies of weights that Transformer Engine keeps for its products",
    CALIBRATION: "correction learned from measured runs; may be negative",
    WORKSPACES: "cuBLAS and Transformer Engine workspaces, rotary tables",
}
