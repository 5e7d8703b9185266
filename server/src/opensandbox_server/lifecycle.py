# SPDX-License-Identifier: Apache-2.0
"""The life of a sandbox, as clients ask for it: create, get, list, delete, renew, metadata, endpoint.

Two rules hold everywhere. A change is a compare-and-set on the row: who loses looks again. And what was begun is
ended: a create or a delete runs on in the background when its client disconnects, so a create whose answer nobody
heard is a sandbox in the list like any other, and expires like any other.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import anyio

from . import context, history, labels, proxy
from .access import EXECD_PORT, Access
from .admission import Admission, full
from .background import Background
from .errors import Code, OpenSandboxError, invalid, not_found, unsupported_field
from .idempotency import Idempotency, Key
from .metrics import Metrics
from .ports import KeyedCreate, LaunchSpec, Page, Report, Runtime, Store
from .sandbox import ENDED, Sandbox, SandboxState
from .validation import ISOLATION, Rules, Wish, validate
from .wire.lifecycle import CreateSandboxRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Endpoint:
    """Where clients reach a port of a sandbox, and what they send along."""

    endpoint: str
    headers: dict[str, str]
    warnings: tuple[str, ...] = ()
    """What keeps clients from using it as it is."""


@dataclass(frozen=True)
class Created:
    """The answer to a create: the sandbox, and all a client needs for its first command."""

    sandbox: Sandbox
    timings: dict[str, float]
    """Milliseconds of each stage, in order; empty when it was made long ago."""
    endpoints: dict[str, Endpoint]
    warnings: tuple[str, ...]
    replayed: bool = False
    """An earlier request with the same Idempotency-Key made it."""


class Stopwatch:
    """Milliseconds of named stages, each from the end of the one before."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.stages: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages[stage] = round((now - self._last) * 1000, 3)
        self._last = now

    def total(self) -> dict[str, float]:
        return {**self.stages, "total": round((time.perf_counter() - self._start) * 1000, 3)}


UNDO_SECONDS = 60.0
"""How long a create that failed may take to clean up; what is left then is the reconcile's."""


def utcnow() -> datetime:
    return datetime.now(UTC)


class Lifecycle:
    """The use cases. Holds a store, which is the truth, and a runtime, which does the work."""

    def __init__(
        self,
        *,
        store: Store,
        runtime: Runtime,
        access: Access,
        rules: Rules,
        admission: Admission,
        metrics: Metrics | None = None,
        node: str,
        epoch: int,
        background: Background,
        wake_expiry: Callable[[datetime], None] = lambda at: None,
        wake_reconcile: Callable[[], None] = lambda: None,
        clock: Callable[[], datetime] = utcnow,
        start_timeout: float = 60.0,
        loopback: bool = True,
    ) -> None:
        """`loopback`: ingress is reached from this machine only, and then opens every port, not just execd's."""
        self._store = store
        self._runtime = runtime
        self._access = access
        self._rules = rules
        self._admission = admission
        self._metrics = metrics or Metrics("")
        self._node = node
        self._epoch = epoch
        self._background = background
        self._wake_expiry = wake_expiry
        self._wake_reconcile = wake_reconcile
        self._clock = clock
        self._start_timeout = start_timeout
        self._loopback = loopback
        self._removing: set[str] = set()
        self._deadlines = anyio.Lock()
        self._idempotency: Idempotency[Created] = Idempotency(
            store=store, background=background, clock=clock, remove=self.remove, recall=self._recall
        )

    # -- create ----------------------------------------------------------------------------------------------------

    async def create(
        self,
        tenant: str,
        request: CreateSandboxRequest,
        *,
        key: Key | None = None,
        client_left: Callable[[], Awaitable[None]] | None = None,
        request_id: str | None = None,
    ) -> Created:
        """Make a sandbox; when this answers, its first command works (or its entry point has already ended).

        With a `key` it is made once, however often it is asked for. `client_left` returns when nobody waits for the
        answer any more; a create whose turn has not come by then raises `admission.ClientLeft`.
        """
        make = partial(self._counted, partial(self._create, tenant, request, key, client_left, request_id))
        if key is None:
            return await make()
        created, replayed = await self._idempotency.once(key, make)
        return replace(created, replayed=True) if replayed else created

    async def _counted(self, create: Callable[[], Awaitable[Created]]) -> Created:
        """A create, and a figure of how it went."""
        with self._metrics.creating() as timings:
            created = await create()
            timings.update(created.timings)
        return created

    async def _create(
        self,
        tenant: str,
        request: CreateSandboxRequest,
        key: Key | None,
        client_left: Callable[[], Awaitable[None]] | None,
        request_id: str | None,
    ) -> Created:
        """Validate and admit. From then on it is finished, whether or not somebody waits for it."""
        watch = Stopwatch()
        now = self._clock()
        wish = validate(request, self._rules, now)
        sandbox = self._pending(tenant, wish, now)
        spec = self._plan(sandbox, request_id)
        await self._runtime.check(spec)
        watch.lap("validate")
        turn = await self._admission.enter(client_left)
        sandbox = _admitted(sandbox, self._clock())
        spec = replace(spec, deadline=sandbox.expires_at)
        watch.lap("admit")
        make = partial(self._make, sandbox, spec, key, wish.warnings, watch)
        if key is None:
            return await self._background.finish(make, done=turn.end)
        # `Idempotency` has it in the background already.
        try:
            self._background.open()
            return await make()
        finally:
            turn.end()

    async def _make(
        self,
        pending: Sandbox,
        spec: LaunchSpec,
        key: Key | None,
        warnings: tuple[str, ...],
        watch: Stopwatch,
    ) -> Created:
        """Reserve, apply until it is ready, publish; or undo all of it."""
        context.sandbox_id.set(pending.id)
        keyed = KeyedCreate(key.tenant, key.text, key.body, pending.id, pending.created_at) if key else None
        await self._reserve(pending, keyed)
        watch.lap("reserve")
        try:
            report = await self._apply(spec)
            watch.lap("launch")
            warnings += report.warnings
            sandbox = await self._publish(pending, report, replace(keyed, warnings=warnings) if keyed else None)
        except BaseException as error:
            await self._undo(pending, error)
            raise
        watch.stages.update({f"launch.{stage}": taken for stage, taken in report.timings.items()})
        watch.lap("publish")
        return self._answer(sandbox, watch.total(), warnings)

    def _answer(self, sandbox: Sandbox, timings: dict[str, float], warnings: tuple[str, ...]) -> Created:
        endpoints = {str(EXECD_PORT): self._endpoint(sandbox, EXECD_PORT)}
        return Created(sandbox=sandbox, timings=timings, endpoints=endpoints, warnings=warnings)

    def _recall(self, sandbox: Sandbox, keyed: KeyedCreate) -> Created:
        return self._answer(sandbox, {}, keyed.warnings or ())

    def _pending(self, tenant: str, wish: Wish, now: datetime) -> Sandbox:
        return Sandbox(
            id=str(uuid.uuid4()),
            tenant=tenant,
            node=self._node,
            runtime=self._runtime.name,
            epoch=self._epoch,
            state=SandboxState.PENDING,
            image=wish.image,
            entrypoint=wish.entrypoint,
            created_at=now,
            changed_at=now,
            expires_at=wish.expires_at,
            env=wish.env,
            limits=wish.limits,
            metadata=wish.metadata,
            extensions=wish.extensions,
            platform=wish.platform,
        )

    def _plan(self, sandbox: Sandbox, request_id: str | None) -> LaunchSpec:
        return LaunchSpec(
            id=sandbox.id,
            image=sandbox.image,
            entrypoint=sandbox.entrypoint,
            env=sandbox.env,
            limits=sandbox.limits,
            generation=sandbox.generation,
            token_sha256=self._access.digest(sandbox.id, sandbox.generation),
            deadline=sandbox.expires_at,
            request_id=request_id,
            isolates=ISOLATION in sandbox.extensions,
        )

    async def _reserve(self, pending: Sandbox, keyed: KeyedCreate | None) -> None:
        most = self._admission.most_sandboxes
        if not await self._store.insert(pending, at_most=most, keyed=keyed) and most is not None:
            free_at = await self._store.next_expiry(of_alive=True)
            raise full(most, (free_at - self._clock()).total_seconds() if free_at else None)

    async def _apply(self, spec: LaunchSpec) -> Report:
        try:
            with anyio.fail_after(self._start_timeout):
                return await self._runtime.create(spec)
        except TimeoutError:
            raise OpenSandboxError(
                Code.SANDBOX_START_TIMEOUT, f"The sandbox was not ready within {self._start_timeout:.0f} seconds."
            ) from None

    async def _publish(self, row: Sandbox, report: Report, keyed: KeyedCreate | None) -> Sandbox:
        """Tell the world. Somebody may have found the Pending row meanwhile: renewed, deleted it, or seen it end."""
        pending = row
        while True:
            if row.state in ENDED:
                after, event = replace(row, isolation=report.isolation, version=row.version + 1), "reported"
            elif row.state is not SandboxState.PENDING:
                raise _deleted_meanwhile(row.id)
            elif report.end is not None:
                after, event = replace(row, isolation=report.isolation).ended(report.end), "ended"
            else:
                after = row.to(
                    SandboxState.RUNNING,
                    self._clock(),
                    reason="RUNNING",
                    message="The sandbox is ready.",
                    isolation=report.isolation,
                )
                event = "running"
            if await self._store.replace(row, after, event=event, keyed=keyed):
                break
            found = await self._store.find(row.id)
            if found is None:
                raise _deleted_meanwhile(row.id)
            row = found
        if after.state in ENDED:
            await self._acknowledge(after.id)
        if after.expires_at is not None:
            self._wake_expiry(after.expires_at)
            if after.expires_at != pending.expires_at:
                await self._send_deadline(after.id)
        return after

    async def _undo(self, pending: Sandbox, error: BaseException) -> None:
        event = (
            f"create failed: {error}"
            if isinstance(error, OpenSandboxError)
            else f"create failed: {type(error).__name__}"
        )
        with anyio.move_on_after(UNDO_SECONDS, shield=True):
            try:
                if not await self.remove(pending.id, event=event):
                    # A delete took the row while the runtime was at work, perhaps before there was anything to end.
                    await self._runtime.delete(pending.id)
            except Exception as problem:
                # The row says Stopping, or there is none: the reconcile ends what could not be ended now.
                log.warning("sandbox %s could not be undone yet: %s", pending.id, problem)
                self._wake_reconcile()

    # -- get, list -------------------------------------------------------------------------------------------------

    async def get(self, tenant: str, sandbox_id: str) -> Sandbox:
        sandbox = await self._store.get(tenant, sandbox_id)
        if sandbox is None:
            raise not_found(sandbox_id)
        return sandbox

    async def list(
        self,
        tenant: str,
        *,
        states: frozenset[SandboxState] | None,
        metadata: dict[str, str],
        page: int,
        page_size: int,
    ) -> Page:
        """Newest first. `states` None means any; an empty set matches nothing."""
        if states is not None and not states:
            return Page((), 0)
        return await self._store.list(
            tenant, states=states or frozenset(), metadata=metadata, page=page, page_size=page_size
        )

    # -- delete ----------------------------------------------------------------------------------------------------

    async def delete(self, tenant: str, sandbox_id: str) -> None:
        """End it and forget it. Of several at once exactly one succeeds; the others find nothing."""
        row = await self.get(tenant, sandbox_id)
        if not await self._background.finish(partial(self.remove, sandbox_id, event="deleting", seen=row)):
            raise not_found(sandbox_id)

    async def remove(
        self,
        sandbox_id: str,
        *,
        event: str,
        wanted: Callable[[Sandbox], bool] = lambda row: True,
        seen: Sandbox | None = None,
    ) -> bool:
        """The one way a sandbox goes: say so in its row, end it, forget the row. False when there was nothing to do.

        The row says Stopping before anything ends, so a server that dies here knows what it was about to do. `wanted`
        is asked about the row as it is at that moment. `seen` is the row if somebody just read it: one question less.
        """
        if sandbox_id in self._removing:
            return False
        self._removing.add(sandbox_id)
        try:
            while True:
                # A row that was Stopping when it was read may be gone by now, and whoever stopped it ended it.
                trusted = seen is not None and seen.state is not SandboxState.STOPPING
                row = seen if trusted else await self._store.find(sandbox_id)
                seen = None
                if row is None or not wanted(row):
                    return False
                if row.state is SandboxState.STOPPING:
                    break
                if await self._store.replace(row, history.stopping(row, event, self._clock()), event=event):
                    break
            remains = await self._runtime.delete(sandbox_id)
            entry = await history.entry_of(row, event, remains, self._clock())
            return await self._store.delete(sandbox_id, entry=entry)
        except BaseException:
            self._wake_reconcile()
            raise
        finally:
            self._removing.discard(sandbox_id)

    # -- renew -----------------------------------------------------------------------------------------------------

    async def renew(self, tenant: str, sandbox_id: str, expires_at: datetime) -> datetime:
        """Move the expiry, to a later or an earlier time. A time without an offset is UTC."""
        if expires_at.tzinfo is None:
            expires_at = expires_at.replace(tzinfo=UTC)
        try:
            expires_at = expires_at.astimezone(UTC)
        except OverflowError:
            raise OpenSandboxError(Code.SANDBOX_INVALID_EXPIRATION, "expiresAt reaches beyond the calendar.") from None
        if expires_at <= self._clock():
            raise OpenSandboxError(Code.SANDBOX_INVALID_EXPIRATION, "expiresAt is not in the future.")

        def renewed(row: Sandbox) -> Sandbox:
            if row.expires_at is None:
                raise OpenSandboxError(
                    Code.SANDBOX_NO_EXPIRATION, f"Sandbox {sandbox_id} does not have automatic expiration enabled."
                )
            return replace(row, expires_at=expires_at, version=row.version + 1)

        told = f"renewed: It now expires at {expires_at.isoformat(timespec='seconds').removesuffix('+00:00')}Z."
        row = await self._change(tenant, sandbox_id, renewed, event=lambda before, after: told)
        self._wake_expiry(expires_at)
        if row.state is SandboxState.RUNNING:
            await self._send_deadline(sandbox_id)
        return expires_at

    async def _send_deadline(self, sandbox_id: str) -> None:
        # Read and send under one lock: of two renewals at once, the last to send has read what both wrote.
        async with self._deadlines:
            row = await self._store.find(sandbox_id)
            if row is None or row.state is not SandboxState.RUNNING:
                return
            try:
                await self._runtime.set_deadline(sandbox_id, row.expires_at)
            except OpenSandboxError as error:
                # Only a machine without its server goes by this; the reconcile says it again.
                log.warning("the deadline of sandbox %s could not be passed on: %s", sandbox_id, error)
                self._wake_reconcile()

    # -- metadata --------------------------------------------------------------------------------------------------

    async def patch_metadata(self, tenant: str, sandbox_id: str, patch: Mapping[str, str | None]) -> Sandbox:
        """JSON merge patch: null removes a key, others stay. Ended sandboxes may be labelled too."""

        def patched(row: Sandbox) -> Sandbox:
            merged = labels.merge(row.metadata, patch)
            return row if merged == row.metadata else replace(row, metadata=merged, version=row.version + 1)

        return await self._change(
            tenant,
            sandbox_id,
            patched,
            event=lambda before, after: f"metadata changed: {labels.change(before.metadata, after.metadata)}",
        )

    async def _change(
        self,
        tenant: str,
        sandbox_id: str,
        change: Callable[[Sandbox], Sandbox],
        *,
        event: Callable[[Sandbox, Sandbox], str],
    ) -> Sandbox:
        """Compare and set until nobody was faster; the row as it is then. One on its way out counts as gone.

        `event` says what is different between two rows; that stays with the event, the row's message is its state's.
        """
        while True:
            row = await self.get(tenant, sandbox_id)
            if row.state is SandboxState.STOPPING:
                raise not_found(sandbox_id)
            after = change(row)
            if after is row or await self._store.replace(row, after, event=event(row, after)):
                return after

    # -- endpoint --------------------------------------------------------------------------------------------------

    async def endpoint(
        self, tenant: str, sandbox_id: str, port: int, *, through: str | None = None, expires: int | None = None
    ) -> Endpoint:
        """Where clients reach a port. Neither checks that the sandbox still runs nor that something listens.

        `through` is this server as the client sees it, when it asks to be forwarded by it.
        """
        if not 1 <= port <= 65535:
            raise OpenSandboxError(Code.SANDBOX_INVALID_PORT, "There is no such port.")
        if through is not None and expires is not None:
            raise invalid("use_server_proxy and expires exclude each other.", hint="Only ingress has signed routes.")
        if expires is not None:
            raise unsupported_field(
                self._runtime.name, "expires", hint="Signed routes are not there yet; leave it out."
            )
        direct = self._endpoint(await self.get(tenant, sandbox_id), port)
        if through is not None:
            return replace(direct, endpoint=f"{through}/{proxy.path_of(sandbox_id, port)}")
        # Published clients ask for endpoints of any port and expect one, so this is said beside it.
        return direct if self._loopback or port == EXECD_PORT else replace(direct, warnings=(_closed(port),))

    def _endpoint(self, sandbox: Sandbox, port: int) -> Endpoint:
        return Endpoint(
            endpoint=f"{self._runtime.public_address()}/{sandbox.id}/{port}",
            headers=self._access.headers(sandbox.id, sandbox.generation, port),
        )

    async def _acknowledge(self, sandbox_id: str) -> None:
        try:
            await self._runtime.acknowledge(sandbox_id)
        except OpenSandboxError as error:
            # It will be told again, and acknowledged then.
            log.info("the end of sandbox %s is stored but not acknowledged yet: %s", sandbox_id, error)


def _admitted(sandbox: Sandbox, now: datetime) -> Sandbox:
    """Its time begins when its turn has come, however long it waited for that."""
    try:
        expires_at = sandbox.expires_at and sandbox.expires_at + (now - sandbox.created_at)
    except OverflowError:
        expires_at = sandbox.expires_at  # at the end of the calendar
    return replace(sandbox, created_at=now, changed_at=now, expires_at=expires_at)


def _closed(port: int) -> str:
    return (
        f"Ingress refuses port {port} on this server ({Code.INGRESS_ACCESS_REQUIRED.value}): beyond loopback it opens "
        "execd's port only. Ask for the endpoint with use_server_proxy=true, and send the API key."
    )


def _deleted_meanwhile(sandbox_id: str) -> OpenSandboxError:
    return OpenSandboxError(
        Code.SANDBOX_NOT_FOUND, f"Sandbox {sandbox_id} was deleted while it was being made.", hint="Create another one."
    )
