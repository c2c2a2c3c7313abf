"""The commands by name. Each lives in its own module and is imported when it runs, so that `log` starts without
Prefect or torch."""

from cyclopts import App

from weighbridge import __version__

app = App(
    name="weighbridge",
    help="Lossless delta weight sync for RL post-training, run by Prefect.",
    version=__version__,
)

app.command(
    "weighbridge.cli.demo:demo",
    name="demo",
    help="The main job on this machine: a small model trains, three hosts follow it, every byte is proven.",
)
app.command(
    "weighbridge.cli.sync:sync",
    name="sync",
    help="Publish a checkpoint folder as the next version, and roll it out to hosts.",
)
app.command(
    "weighbridge.cli.host:host",
    name="host",
    help="Run on an inference host: follow the store, as Prefect and the store's head say.",
)
app.command(
    "weighbridge.cli.up:up",
    name="up",
    help="Run a training run's steward: rollouts started from the UI, and upkeep on its schedules.",
)
app.command(
    "weighbridge.cli.replica:pull",
    name="pull",
    help="Bring a replica to a version from the store alone, without an orchestrator.",
)
app.command(
    "weighbridge.cli.replica:verify",
    name="verify",
    help="Prove a version, a replica or a checkpoint folder by its digests.",
)
app.command("weighbridge.cli.replica:checkout", name="checkout", help="Rebuild a version as an HF checkpoint folder.")
app.command(
    "weighbridge.cli.anchor:anchor",
    name="anchor",
    help="Make an anchor: the whole state of a version, for hosts that come late or were away for long.",
)
app.command(
    "weighbridge.cli.retention:gc",
    name="gc",
    help="Collect versions that nobody needs: not one of the last, not named, not in a live host's reach.",
)
app.command("weighbridge.cli.retention:keep", name="keep", help="Keep a version under a name, whatever gc does.")
app.command("weighbridge.cli.retention:release", name="release", help="Give a name back that keeps a version.")
app.command("weighbridge.cli.retention:names", name="names", help="The versions that are kept under names.")
app.command(
    "weighbridge.cli.history:status",
    name="status",
    help="The hosts: which version each serves, how far behind it is, how its last sync went.",
)
app.command("weighbridge.cli.history:log", name="log", help="The versions of a run, newest first.")
app.command(
    "weighbridge.cli.history:show", name="show", help="One version: what changed, and what every host made of it."
)
app.command("weighbridge.cli.history:diff", name="diff", help="What changed between two versions, tensor by tensor.")
app.command("weighbridge.cli.history:blame", name="blame", help="The versions that changed a tensor, newest first.")
app.command("weighbridge.cli.history:hosts", name="hosts", help="Who served what, when, and how long the pause was.")
app.command(
    "weighbridge.cli.stats:stats",
    name="stats",
    help="Density, ratio and times over versions, as a table and as a chart.",
)
app.command(
    "weighbridge.cli.audit:audit",
    name="audit",
    help="Read everything in a store, and prove it: the chain, shards, records, segments.",
)
app.command(
    "weighbridge.cli.keygen:keygen",
    name="keygen",
    help="Make a key pair: trainers sign versions with the one, hosts trust the other.",
)
app.command(
    "weighbridge.cli.compact:compact",
    name="compact",
    help="Bring the history's segments up to date, so that questions about long runs stay quick.",
)
app.command(
    "weighbridge.cli.retry:retry", name="retry", help="Run the failed host syncs of a version again, on the same hosts."
)

server = App(name="server", help="The embedded Prefect server of this machine: start, stop, where.")
server.command("weighbridge.cli.server:start", name="start", help="Start the server, or say where it already runs.")
server.command("weighbridge.cli.server:stop", name="stop", help="Stop the server and its database.")
server.command("weighbridge.cli.server:where", name="where", help="Where the server runs, if it does.")
app.command(server)
