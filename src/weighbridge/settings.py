"""What can be set, and from where: arguments, then `WEIGHBRIDGE_*`, then weighbridge.toml, then [tool.weighbridge] in
pyproject.toml. Unknown keys are errors; contradictions are refused here, before anything starts."""

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    PyprojectTomlConfigSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from weighbridge.errors import UsageError
from weighbridge.storage.peers.registry import LAYOUTS
from weighbridge.storage.replica.room import Kind
from weighbridge.storage.signing import SIGNED_DIGEST, Signer, Trust, read_signer, read_trust
from weighbridge.storage.stores.hooks import Hooks
from weighbridge.storage.stores.profile import Addressing, Checksums, Profile
from weighbridge.tasks.collective.desk import Address
from weighbridge.tasks.collective.group import Backend
from weighbridge.tasks.engines.spec import EngineSpec, Pulls

PREFIX = "WEIGHBRIDGE_"
_ADDRESS = re.compile(r"(?P<host>[^:\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_TOLD_TO_COMMANDS = frozenset({"PATH", "VERSION", "EVENT"})  # what engine commands and hooks find in their environment


def default_home() -> Path:
    """Where this machine's own state lives: $XDG_STATE_HOME or ~/.local/state, by machine."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "weighbridge" / platform.node()  # homes are shared on clusters; a server is one machine's


def _split(value: object) -> object:
    """Names as an environment variable or an option gives them: with commas between."""
    return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """All settings. Sizes in bytes, times in seconds. Build it with `load_settings`, which names every fault."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        toml_file="weighbridge.toml",
        pyproject_toml_table_header=("tool", "weighbridge"),
    )

    store: str | None = None
    base: Path | None = None
    run: str | None = None
    hosts: Names = ()
    aliases: dict[str, str] = Field(default_factory=dict)
    unchanged: Names = ()
    trainable: Names = ()  # patterns of the tensors that training may change; others that do raise an alarm
    digest: Literal["xxh3-128", "blake3"] = "xxh3-128"
    # signatures: the trainer's private key; the public keys that are trusted, and how old the newest version may be
    sign: Path | None = None
    trust: Names = ()
    allowed_age: float | None = Field(default=None, gt=0)
    policy: Literal["all", "best-effort"] | float = "all"
    sync_deadline: float = Field(default=600.0, gt=0)
    cutover: Literal["each", "together"] = "each"
    shard_bytes: int = Field(default=128 << 20, ge=1 << 20, le=1 << 30)
    threads: int = Field(default=0, ge=0)
    # where a pushed folder's shards are encoded: here, or on a cluster (None: one of this machine's own) whose workers
    # see the folder, the base and the store under the same names
    encode_on: Literal["threads", "dask", "ray"] = "threads"
    encode_address: str | None = None
    # how hosts get what was just committed: from the store, or first from the trainer's ranks, by a broadcast. Both
    # sides name the address at which the first rank listens; see docs/TRANSPORT.md
    transport: Literal["store", "collective"] = "store"
    transport_address: str | None = None
    transport_backend: Backend = "gloo"
    transport_window: float = Field(default=5.0, gt=0)
    transport_seconds: float = Field(default=60.0, gt=0)
    spool: Path | None = None
    snapshot: Kind = "memory"  # "mmap" keeps a writer's copy of the model in a file in its spool
    # with torch.distributed: all ranks push together, or this one alone; how long one waits for another, and how long
    # one whose source failed waits for the others to come out of theirs before it breaks the collectives they hang in
    ranks: Literal["all", "alone"] = "all"
    rank_deadline: float = Field(default=600.0, gt=0)
    rank_grace: float = Field(default=30.0, gt=0)
    home: Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())] = Field(
        default_factory=default_home
    )
    # how the store's endpoint is spoken to; credentials come from the provider's own chain, never from here
    store_endpoint: str | None = None
    store_region: str | None = None
    store_addressing: Addressing = "auto"
    store_checksums: Checksums = "when_supported"
    store_credentials_profile: str | None = None
    store_anonymous: bool = False
    store_call_seconds: float = Field(default=30.0, gt=0)
    # a step of the store's own: a command, or module:function
    after_publish: str = ""
    before_read: str = ""
    # neighbours' layouts, written beside ours or read instead: see docs/PEERS.md
    layout: Names = ()
    layout_store: str | None = None
    layout_encoding: Literal["xor", "overwrite"] = "xor"
    layout_checksum: Literal["xxh3-128", "blake3", "adler32"] = "xxh3-128"
    layout_anchors: int = Field(default=10, ge=0)
    # retention: how many of the last versions gc keeps, for how long a silent host holds what it needs, and how many
    # versions a host may be behind before it counts as stale
    keep: int | None = Field(default=None, ge=1)
    grace: float = Field(default=86_400.0, ge=0)
    allowed_staleness: int | None = Field(default=None, ge=0)
    alarm_unchanged: int = Field(default=3, ge=1)  # versions in a row without one changed byte
    checkpoint: Path | None = None  # a steward's own: the folder that `sync-checkpoint` publishes when it is asked to
    # a host's own
    name: str | None = None
    replica: Path | None = None
    copies: Literal[1, 2] = 2
    durability: Literal["power", "process"] = "power"
    lock_deadline: float = Field(default=30.0, ge=0)
    engine: str = "none"
    engine_command: str | None = None
    engine_url: str | None = None
    engine_remote: bool = False
    engine_prompt: str = "The"
    engine_api_key: SecretStr | None = None
    engine_api_key_file: Path | None = None
    engine_admin_key: SecretStr | None = None
    engine_admin_key_file: Path | None = None
    engine_maps_files: bool = False
    engine_checksum: bool = False  # vLLM, SGLang: hold each load against the engine's own checksum of its weights
    engine_pull_from: str | None = None  # SGLang alone: a root of layout pull-weights, as the server sees it,
    engine_pull_into: Path | None = None  # and the checkpoint on this machine that the server patches with it
    engine_restart: str | None = None  # a command for an engine that was left paused: it starts it anew, on {path}
    engine_nodes: Names = ()  # the hosts on the other machines of an engine that spans several
    engine_deadline: float = Field(default=300.0, gt=0)
    poll_seconds: float = Field(default=1.0, gt=0)
    follow_seconds: float = Field(default=10.0, gt=0)
    metrics_listen: str = ""  # "address:port" at which Prometheus may ask; nothing is opened unless it is set
    log_json: bool = False

    @property
    def encode_threads(self) -> int:
        """Threads that encode and apply: what was asked for, else the processors this process may use."""
        return self.threads or max(1, len(os.sched_getaffinity(0)))

    @property
    def digest_kind(self) -> str:
        """The digests of a run that begins: those that signing needs, else as asked for."""
        return self.digest if self.sign is None else SIGNED_DIGEST

    @property
    def signer(self) -> Signer | None:
        """The key that versions are signed with. Raises UsageError for a file that holds none."""
        return None if self.sign is None else read_signer(self.sign)

    @property
    def trusted(self) -> Trust | None:
        """The keys whose versions are believed; None: nobody asked for any. Raises UsageError."""
        if not self.trust:
            return None
        return read_trust(map(Path, self.trust), max_age_seconds=self.allowed_age)

    @property
    def profile(self) -> Profile:
        """How the store's endpoint is spoken to. Raises UsageError for what no endpoint can be."""
        return Profile(
            endpoint_url=self.store_endpoint,
            region=self.store_region,
            addressing=self.store_addressing,
            checksums=self.store_checksums,
            credentials_profile=self.store_credentials_profile,
            anonymous=self.store_anonymous,
            call_seconds=self.store_call_seconds,
        )

    @property
    def listens(self) -> Address | None:
        """Where the trainer's first rank is found by hosts that a broadcast reaches; None: they read the store."""
        found = _ADDRESS.fullmatch(self.transport_address or "")
        return None if found is None else Address(found["host"].strip("[]"), int(found["port"]))

    @property
    def hooks(self) -> Hooks:
        """The store's own steps. Raises UsageError for a function that is not there."""
        return Hooks(after_publish=self.after_publish, before_read=self.before_read)

    @property
    def engine_spec(self) -> EngineSpec:
        """All that it takes to speak to the engine. Raises UsageError for a key file that cannot be read."""
        return EngineSpec(
            kind=self.engine,
            url=self.engine_url,
            command=self.engine_command,
            api_key=_key(self.engine_api_key, self.engine_api_key_file),
            admin_key=_key(self.engine_admin_key, self.engine_admin_key_file),
            remote=self.engine_remote,
            prompt=self.engine_prompt,
            maps_files=self.engine_maps_files,
            checksum=self.engine_checksum,
            pulls=None if not self.engine_pull_from else Pulls(self.engine_pull_from, self.engine_pull_into or Path()),
        )

    @property
    def required(self) -> float:
        """The share of the hosts that must make it."""
        if isinstance(self.policy, float):
            return self.policy
        return 1.0 if self.policy == "all" else 0.0

    @model_validator(mode="after")
    def _no_contradictions(self) -> "Settings":
        if isinstance(self.policy, float) and not 0 < self.policy <= 1:
            raise ValueError(f"policy {self.policy} is not a share of the hosts: above 0, at most 1")
        if self.engine == "command" and not self.engine_command:
            raise ValueError("engine 'command' needs engine_command, the command that reloads the engine")
        if self.engine_command and self.engine != "command":
            raise ValueError(f"engine_command is set, but the engine is {self.engine!r}")
        if self.keep is not None and self.allowed_staleness is not None and self.keep <= self.allowed_staleness:
            raise ValueError(
                f"keep {self.keep} is shorter than what hosts may be behind (allowed_staleness "
                f"{self.allowed_staleness}): a host that is allowed to lag would find its versions collected"
            )
        if self.engine_restart and self.engine == "none":
            raise ValueError("engine_restart is set, but the engine is 'none'")
        if self.engine in ("vllm", "sglang") and not self.engine_url:
            raise ValueError(f"engine {self.engine!r} needs engine_url, where its server listens")
        if self.engine_api_key and self.engine_api_key_file:
            raise ValueError("engine_api_key and engine_api_key_file are both set")
        if self.engine_admin_key and self.engine_admin_key_file:
            raise ValueError("engine_admin_key and engine_admin_key_file are both set")
        if self.sign is not None and "digest" in self.model_fields_set and self.digest != SIGNED_DIGEST:
            raise ValueError(f"sign needs digest {SIGNED_DIGEST}, and digest is {self.digest}, which can be forged")
        if unknown := sorted(set(self.layout) - LAYOUTS.keys()):
            raise ValueError(f"no layout {', '.join(unknown)} is known: {', '.join(LAYOUTS)}")
        if (self.engine_pull_from is None) != (self.engine_pull_into is None) or (
            self.engine_pull_from and self.engine != "sglang"
        ):
            raise ValueError("engine_pull_from and engine_pull_into go together, and with engine 'sglang' alone")
        if self.allowed_age is not None and not self.trust:
            raise ValueError("allowed_age is set, but no key to trust: an age that nobody signed means nothing")
        if (self.transport == "collective") != (self.transport_address is not None):
            raise ValueError("transport 'collective' and transport_address go together")
        if self.transport_address is not None and not _ADDRESS.fullmatch(self.transport_address):
            raise ValueError(f"transport_address {self.transport_address!r} is not host:port, nor [address]:port")
        if self.transport == "collective" and self.encode_on != "threads":
            raise ValueError(
                f"transport 'collective' sends what this process encoded, not encode_on {self.encode_on!r}"
            )
        if self.encode_address is not None and self.encode_on == "threads":
            raise ValueError("encode_address names a cluster, and encode_on does not say which kind: dask or ray")
        if self.encode_on != "threads" and self.layout:
            raise ValueError(
                f"a layout is written from the whole model, which encode_on {self.encode_on!r} never holds"
            )
        if len(set(self.hosts)) != len(self.hosts):
            raise ValueError("a host is named twice")
        if self.name in self.engine_nodes:
            raise ValueError(f"engine_nodes names {self.name}, which is this host: name the other machines' hosts")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, environment, weighbridge.toml, pyproject.toml; the first that says something wins."""
        return (
            init_settings,
            env_settings,
            TomlConfigSettingsSource(settings_cls),
            PyprojectTomlConfigSettingsSource(settings_cls),
        )


def _key(key: SecretStr | None, file: Path | None) -> str | None:
    if file is None:
        return key.get_secret_value() if key is not None else None
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the engine's key cannot be read from {file}: {error}. Nothing was started.") from error


def load_settings(arguments: Mapping[str, Any]) -> Settings:
    """Settings from all sources; arguments that are None were not given. Raises UsageError, naming every fault."""
    unknown = [
        name
        for name in os.environ
        if name.startswith(PREFIX)
        and name.removeprefix(PREFIX).lower() not in Settings.model_fields
        and name.removeprefix(PREFIX) not in _TOLD_TO_COMMANDS
    ]
    if unknown:
        raise UsageError(f"no such setting: {', '.join(sorted(unknown))}. Nothing was started.")
    try:
        return Settings(**{k: v for k, v in arguments.items() if v is not None})
    except ValidationError as error:
        said = [(".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()]
        faults = "; ".join(f"{name}: {why}" if name else why for name, why in said)
        raise UsageError(f"settings that cannot be right: {faults}. Nothing was started.") from error
    except (SettingsError, ValueError, RecursionError) as error:  # a variable that is no JSON, a file that is no TOML
        raise UsageError(f"settings that cannot be read: {error}. Nothing was started.") from error
