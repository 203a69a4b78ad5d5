"""Runs migrations in one transaction, with a lock: two at once are one after the other."""

from alembic import context
from app.db.models import Base
from app.db.session import create_database_engine
from app.settings import get_settings

ADVISORY_LOCK = 0x004F4F4D  # any fixed number


def run_online() -> None:
    settings = context.config.attributes.get("settings") or get_settings()
    engine = create_database_engine(settings, immediate=True)
    is_sqlite = engine.dialect.name == "sqlite"
    try:
        with engine.begin() as connection:
            if not is_sqlite:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})")
            context.configure(
                connection=connection,
                target_metadata=Base.metadata,
                render_as_batch=is_sqlite,
                compare_type=True,
                transactional_ddl=True,
                transaction_per_migration=False,
            )
            with context.begin_transaction():
                context.run_migrations()
    finally:
        engine.dispose()


def run_offline() -> None:
    settings = context.config.attributes.get("settings") or get_settings()
    context.configure(url=settings.resolved_database_url, target_metadata=Base.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    run_offline()
else:
    run_online()
