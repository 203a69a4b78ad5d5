"""Configuration of the bot by environment (prefix OOMBUDSMAN_SLACK_)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class BotSettings(BaseSettings):
    """One workspace, one key of the service."""

    model_config = SettingsConfigDict(env_prefix="OOMBUDSMAN_SLACK_", extra="ignore")

    bot_token: SecretStr = Field(description="xoxb-…, of the installed app")
    app_token: SecretStr | None = Field(default=None, description="xapp-…, for Socket Mode")
    signing_secret: SecretStr | None = Field(default=None, description="for HTTP mode")
    mode: Literal["socket", "http"] = "socket"
    host: str = "127.0.0.1"
    port: int = Field(default=3000, ge=0, le=65535)
    service_url: str = "http://127.0.0.1:8000"
    public_url: str | None = None
    """Address under which people reach the service's pages; None = ``service_url``."""
    api_key: SecretStr | None = None
    slack_api_url: str = "https://slack.com/api/"
    max_file_bytes: int = Field(default=20 * 1024**2, ge=1024)
    service_timeout_seconds: float = Field(default=60.0, gt=0, le=600)

    @model_validator(mode="after")
    def _complete(self) -> BotSettings:
        if self.mode == "socket" and self.app_token is None:
            raise ValueError("app_token is required for Socket Mode (xapp-..., scope connections:write)")
        if self.mode == "http" and self.signing_secret is None:
            raise ValueError("signing_secret is required for HTTP mode (Basic Information, App Credentials)")
        return self

    @property
    def pages_url(self) -> str:
        """Without a slash at its end."""
        return (self.public_url or self.service_url).rstrip("/")
