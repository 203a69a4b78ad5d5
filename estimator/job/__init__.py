"""What a user says, read into settings: recipe < config < overrides, then Bridge's own silent adjustments."""
