"""Profiled runs, what the estimate says of each, and the outcomes of recommendations.

Revision: 0002, after 0001
"""

import sqlalchemy as sa

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "profiled_runs",
        sa.Column("run_id", sa.String(200), nullable=False),
        sa.Column("stored_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("gpu", sa.String(64), nullable=False),
        sa.Column("strategy", sa.String(32), nullable=True),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("allocator", sa.String(32), nullable=False),
        sa.Column("peak_allocated_bytes", sa.BigInteger(), nullable=True),
        sa.Column("persistent_bytes", sa.BigInteger(), nullable=True),
        sa.Column("peak_reserved_bytes", sa.BigInteger(), nullable=True),
        sa.Column("recommendation_id", sa.String(64), nullable=True),
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_profiled_runs"),
    )
    op.create_index("ix_profiled_runs_stored_at_run_id", "profiled_runs", ["stored_at", "run_id"])
    op.create_index("ix_profiled_runs_gpu_stored_at_run_id", "profiled_runs", ["gpu", "stored_at", "run_id"])
    op.create_index("ix_profiled_runs_strategy_stored_at_run_id", "profiled_runs", ["strategy", "stored_at", "run_id"])
    op.create_index("ix_profiled_runs_outcome_stored_at_run_id", "profiled_runs", ["outcome", "stored_at", "run_id"])
    op.create_index("ix_profiled_runs_fingerprint", "profiled_runs", ["fingerprint"])
    op.create_index("ix_profiled_runs_recommendation_id", "profiled_runs", ["recommendation_id"])
    op.create_table(
        "run_predictions",
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("estimator_version", sa.String(64), nullable=False),
        sa.Column("refused", sa.String(200), nullable=True),
        sa.Column("peak_allocated_bytes", sa.BigInteger(), nullable=True),
        sa.Column("persistent_bytes", sa.BigInteger(), nullable=True),
        sa.Column("peak_reserved_bytes", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("fingerprint", "estimator_version", name="pk_run_predictions"),
    )


def downgrade() -> None:
    op.drop_table("run_predictions")
    for name in (
        "ix_profiled_runs_recommendation_id",
        "ix_profiled_runs_fingerprint",
        "ix_profiled_runs_outcome_stored_at_run_id",
        "ix_profiled_runs_strategy_stored_at_run_id",
        "ix_profiled_runs_gpu_stored_at_run_id",
        "ix_profiled_runs_stored_at_run_id",
    ):
        op.drop_index(name, "profiled_runs")
    op.drop_table("profiled_runs")
