"""The Slack bot: a process of its own that speaks HTTP to the service and knows nothing else of it."""
