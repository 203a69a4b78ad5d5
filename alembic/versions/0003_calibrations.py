"""Calibrations, which of them are active, and what they need of runs and predictions.

Revision: 0003, after 0002
"""

import json

import sqlalchemy as sa

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

PINNED = {"megatron_core": "0.19.2", "transformer_engine": "2.12.0", "torch": "2.11.0"}
"""What a run without versions is taken to have run on, when this migration was written."""


def upgrade() -> None:
    with op.batch_alter_table("profiled_runs") as table:
        table.add_column(sa.Column("stack", sa.String(120), nullable=False, server_default=""))
        table.add_column(sa.Column("survival_bytes", sa.BigInteger(), nullable=True))
        table.add_column(sa.Column("device_used_bytes", sa.BigInteger(), nullable=True))
    _fill()
    op.create_index("ix_profiled_runs_stack_gpu", "profiled_runs", ["stack", "gpu"])
    with op.batch_alter_table("run_predictions") as table:
        table.add_column(sa.Column("survival_bytes", sa.BigInteger(), nullable=True))
        table.add_column(sa.Column("components", sa.JSON(), nullable=True))
        table.add_column(sa.Column("model", sa.String(64), nullable=True))
        table.add_column(sa.Column("num_communicators", sa.Integer(), nullable=True))
    # Predictions can be made again at any time; those without components would be of no use.
    op.execute("DELETE FROM run_predictions")
    op.create_table(
        "calibrations",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stack", sa.String(120), nullable=False),
        sa.Column("gpu_family", sa.String(32), nullable=False),
        sa.Column("estimator_version", sa.String(64), nullable=False),
        sa.Column("num_runs", sa.Integer(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("run_ids", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_calibrations"),
    )
    op.create_index("ix_calibrations_created_at_id", "calibrations", ["created_at", "id"])
    op.create_table(
        "active_calibrations",
        sa.Column("stack", sa.String(120), nullable=False),
        sa.Column("gpu_family", sa.String(32), nullable=False),
        sa.Column("calibration_id", sa.String(64), nullable=False),
        sa.Column("activated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("stack", "gpu_family", name="pk_active_calibrations"),
        sa.ForeignKeyConstraint(
            ["calibration_id"], ["calibrations.id"], name="fk_active_calibrations_calibration_id_calibrations"
        ),
    )


def _fill() -> None:
    """The stack of runs that are stored already, to the minor version."""
    connection = op.get_bind()
    runs = sa.table("profiled_runs", sa.column("run_id"), sa.column("document"), sa.column("stack"),
                    sa.column("device_used_bytes"))  # fmt: skip
    last = ""
    while True:
        batch = connection.execute(
            sa.select(runs.c.run_id, runs.c.document).where(runs.c.run_id > last).order_by(runs.c.run_id).limit(500)
        ).all()
        if not batch:
            return
        last = batch[-1].run_id
        for row in batch:
            document = json.loads(row.document) if isinstance(row.document, str) else row.document
            versions = {**PINNED, **(document.get("stack") or {})}
            parts = (f"{name}={'.'.join(versions[name].partition('+')[0].split('.')[:2])}" for name in PINNED)
            used = (document.get("measured") or {}).get("device_used_bytes")
            connection.execute(
                sa.update(runs)
                .where(runs.c.run_id == row.run_id)
                .values(stack=",".join(parts)[:120], device_used_bytes=used)
            )


def downgrade() -> None:
    op.drop_table("active_calibrations")
    op.drop_index("ix_calibrations_created_at_id", "calibrations")
    op.drop_table("calibrations")
    with op.batch_alter_table("run_predictions") as table:
        for name in ("num_communicators", "model", "components", "survival_bytes"):
            table.drop_column(name)
    op.drop_index("ix_profiled_runs_stack_gpu", "profiled_runs")
    with op.batch_alter_table("profiled_runs") as table:
        for name in ("device_used_bytes", "survival_bytes", "stack"):
            table.drop_column(name)
