"""SQL: models, sessions, migrations, and the repositories that hold every statement."""
