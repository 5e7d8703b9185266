# SPDX-License-Identifier: Apache-2.0
"""Templates, as values: images prepared so that sandboxes start from them at once."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import AliasChoices, Field

from opensandbox.models.base import Answer, Asked, NotBlank, Value
from opensandbox.models.sandboxes import PaginationInfo

__all__ = [
    "CreateTemplateRequest",
    "PagedTemplateInfos",
    "TemplateFilter",
    "TemplateInfo",
    "TemplatePhase",
    "TemplateReadiness",
    "TemplateStatus",
]


class TemplatePhase(StrEnum):
    """How far a template is."""

    PENDING = "Pending"
    BUILDING = "Building"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class TemplateReadiness(Value):
    """When a sandbox counts as ready to be kept."""

    probe: str | None = None
    warmup_seconds: int | None = Field(default=None, alias="warmupSeconds")


class CreateTemplateRequest(Asked):
    """What to prepare, and where to publish it."""

    image: NotBlank
    publish: NotBlank
    resource_limits: dict[str, str] | None = Field(default=None, alias="resourceLimits")
    entrypoint: list[str] | None = None
    env: dict[str, str] | None = None
    metadata: dict[str, str] | None = None
    readiness: TemplateReadiness | None = None
    format: Literal["native", "overlaybd"] | None = None


class TemplateStatus(Answer):
    """How far a template is. `phase` is one of `TemplatePhase`, or a newer one as plain text."""

    phase: str
    manifest_ref: str | None = None
    message: str | None = None


class TemplateInfo(Answer):
    """A template as the server knows it."""

    template_id: str
    image: str
    publish: str
    format: str
    status: TemplateStatus
    created_at: datetime
    updated_at: datetime
    resource_limits: dict[str, str] | None = None
    entrypoint: list[str] | None = None
    env: dict[str, str] | None = None
    metadata: dict[str, str] | None = None
    readiness: TemplateReadiness | None = None


class TemplateFilter(Asked):
    """Which templates to list: all of `metadata`."""

    metadata: dict[str, str] | None = None
    page_size: int | None = Field(default=None, gt=0, alias="pageSize")
    page: int | None = Field(default=None, ge=0)


class PagedTemplateInfos(Answer):
    """A page of templates."""

    template_infos: list[TemplateInfo] = Field(validation_alias=AliasChoices("template_infos", "items"))
    pagination: PaginationInfo
