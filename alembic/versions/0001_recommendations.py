"""Recommendations: every answer of POST /recommend.

Revision: 0001, the first
"""

import sqlalchemy as sa

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "recommendations",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("result", sa.JSON(), nullable=False),
        sa.Column("estimator_version", sa.String(64), nullable=False),
        sa.Column("calibration_id", sa.String(64), nullable=True),
        sa.Column("schema_version", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_recommendations"),
    )
    op.create_index("ix_recommendations_created_at", "recommendations", ["created_at"])


def downgrade() -> None:
    op.drop_index("ix_recommendations_created_at", "recommendations")
    op.drop_table("recommendations")
