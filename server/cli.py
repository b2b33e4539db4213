"""The `forebay` command: reads flags, finds the command, and says what went wrong in one sentence.

Nothing here imports torch: threads and OpenMP are set up before the first command loads it.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from forebay import __version__
from forebay.model.errors import ConfigError, ForebayError
from forebay.server.config import Config, Origins, load
from forebay.server.limits import OWN_KEY

# Flags that stand for one setting each; the names are stable.
SETTING_FLAGS = {
    "--model": ("model.path", "MODEL", "demo, a checkpoint folder, or synthetic:v41-flash[,experts=N]"),
    "--host": ("server.host", "HOST", "address to listen on"),
    "--port": ("server.port", "PORT", "port to listen on"),
    "--device": ("engine.device", "cpu|cuda", "where the network runs"),
    "--cache-dir": ("cache.dir", "DIR", "folder of the SSD store, or none"),
    "--redis-url": ("cache.redis_url", "URL", "pool of window snapshots: redis://…, embedded or none"),
}

_OUTPUT_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what writing may meet


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one sentence that names the nearest right spelling."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            nearest = difflib.get_close_matches(choice[1], re.findall(r"[\w-]+", choice[2]), n=1, cutoff=0.0)[0]
            message = f"there is no command {choice[1]!r}; the nearest is {nearest!r}"
        command = self.prog.partition(" ")[2]
        raise ConfigError(f"{command}: {message}; see `{self.prog} --help`" if command else f"{message}; see `{self.prog} --help`")


def build_parser() -> Parser:
    """The whole parser."""
    parser = Parser(prog="forebay", description="Serve DeepSeek-V4.1-Flash behind the OpenAI and Anthropic APIs.")
    parser.add_argument("--version", action="version", version=f"forebay {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    serve = commands.add_parser("serve", help="serve a model over HTTP", description="Serve a model over HTTP until SIGTERM or Ctrl-C.")
    _add_settings(serve)

    text = f"Talk to a running server in the terminal. Its API key, if it wants one, is taken from {OWN_KEY} in the environment."
    chat = commands.add_parser("chat", help="talk to a running server", description=text)
    chat.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    chat.add_argument("--name", help="model name to ask for (default: the first one that the server lists)")
    chat.add_argument("--effort", help="reasoning effort to begin with: none, low, high, max or 1 to 100 (default: the server's)")
    chat.add_argument("--max-tokens", type=int, metavar="N", help="output limit per turn (default: the server's)")

    check = commands.add_parser(
        "check",
        help="plan a model on this machine",
        description="Show what a model needs and whether it fits here, without loading weights.",
    )
    check.add_argument("check_model", metavar="MODEL", nargs="?", help="demo, a checkpoint folder, or synthetic:v41-flash[,experts=N]")
    check.add_argument("--memory", metavar="SIZE", help="plan for this much memory, such as 141GB (default: what this machine has free)")
    check.add_argument("--json", action="store_true", help="print the plan as JSON")
    _add_settings(check)

    config = commands.add_parser(
        "config", help="print the effective settings", description="Print every setting, its value and where it came from."
    )
    config.add_argument("--describe", action="store_true", help="say what each setting means, its unit and its range")
    _add_settings(config)

    _add_keys(commands.add_parser("keys", help="make API keys", description="Make API keys, and list them; a running server notices."))
    _add_cache(
        commands.add_parser("cache", help="look after the SSD store", description="Look after the SSD store, also beside a running server.")
    )
    _add_bench(commands.add_parser("bench", help="measure this server", description="Measure ratios in one run on this machine."))
    return parser


def _add_settings(parser: argparse.ArgumentParser, *, listens: bool = True) -> None:
    """The flags of settings; those of `server.` only for a command that `listens` or shows where one would."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file with settings")
    for flag, (key, metavar, text) in SETTING_FLAGS.items():
        if listens or not key.startswith("server."):
            parser.add_argument(flag, metavar=metavar, help=text)
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="any setting, such as engine.max_sequences=16 (repeatable)"
    )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    text = "Make a key, show it once, and append its salted hash to the file. To take a key away, delete its line."
    add = kinds.add_parser("add", help="make a key", description=text)
    add.add_argument("name", metavar="NAME", help="of the key, in the log: at most 64 letters, digits and . _ -")
    add.add_argument("--tenant", metavar="NAME", help="whose cached blocks it uses (default: the key is its own tenant)")
    add.add_argument("--requests-per-minute", type=int, metavar="N", help="limit (default: none)")
    add.add_argument("--tokens-per-minute", type=int, metavar="N", help="limit, tokens of prompts and answers (default: none)")
    add.add_argument("--concurrency", type=int, metavar="N", help="limit of requests at once (default: none)")
    add.add_argument("--priority", type=int, metavar="N", help="the most urgent that its requests may have; lower is sooner (default: 0)")
    add.add_argument("--cache-salt", metavar="TEXT", help="cache_salt of requests that state none (default: none)")
    add.add_argument("--admin", action="store_true", help="it may read /metrics where that needs a key")
    show = kinds.add_parser("list", help="names and limits", description="List the keys of the file: names, tenants and limits.")
    for kind in (add, show):
        kind.add_argument("--file", type=Path, metavar="FILE", help="file of keys (default: the setting server.api_keys_file)")
        _add_settings(kind, listens=False)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    texts = {
        "stats": "how much the store holds and may hold",
        "ls": "what is stored, by model and tenant",
        "verify": "read every block and check its sum; bad ones are deleted",
        "purge": "delete blocks, unrecoverably, and the snapshots in Redis",
    }
    for action, text in texts.items():
        kind = kinds.add_parser(action, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if action == "purge":
            whose = "only the blocks of this tenant: its cache_salt, or its name as `cache ls` shows it"
            kind.add_argument("--tenant", metavar="NAME", help=whose)
            kind.add_argument("--yes", action="store_true", help="do not ask")
        kind.add_argument("--json", action="store_true", help="print JSON")
        _add_settings(kind, listens=False)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="bench", metavar="KIND", required=True, parser_class=Parser)

    serve = kinds.add_parser(
        "serve", help="many streams at once", description="Run many streams at once, by default against its own server."
    )
    serve.add_argument("--url", help="a running server (default: start one on a free port)")
    serve.add_argument("--streams", type=int, default=64, metavar="N", help="concurrent streams (default: %(default)s)")
    serve.add_argument("--prompt-tokens", type=int, default=64, metavar="N", help="length of each prompt, about (default: %(default)s)")
    serve.add_argument("--max-tokens", type=int, default=32, metavar="N", help="tokens each stream generates (default: %(default)s)")
    serve.add_argument("--repeats", type=int, default=1, metavar="N", help="rounds; medians are reported (default: %(default)s)")
    serve.add_argument("--compare-sequential", action="store_true", help="also run the same requests one by one, and print the ratio")

    prefill = kinds.add_parser("prefill", help="bounded against exact prefill", description="Time a long prompt in both modes.")
    prefill.add_argument("--tokens", type=int, default=4096, metavar="N", help="prompt length (default: %(default)s)")
    prefill.add_argument("--repeats", type=int, default=5, metavar="N", help="interleaved runs of each (default: %(default)s)")

    decode = kinds.add_parser("decode", help="step time by context", description="Time a decode step at several context lengths.")
    decode.add_argument("--contexts", default="1024,16384", metavar="N,N", help="context lengths in tokens (default: %(default)s)")
    many = "also steps of so many sequences through the whole engine (default: none; on a GPU 1,8,64)"
    decode.add_argument("--streams", dest="batches", metavar="N,N", help=many)
    decode.add_argument("--steps", type=int, default=24, metavar="N", help="steps timed per visit (default: %(default)s)")
    decode.add_argument("--repeats", type=int, default=3, metavar="N", help="interleaved visits to each length (default: %(default)s)")

    invariance = kinds.add_parser(
        "invariance", help="price of batch invariance", description="Time prefill and a decode step with and without batch invariance."
    )
    invariance.add_argument("--tokens", type=int, default=2048, metavar="N", help="prompt length (default: %(default)s)")
    invariance.add_argument("--streams", type=int, default=64, metavar="N", help="sequences that decode together (default: %(default)s)")
    invariance.add_argument("--repeats", type=int, default=5, metavar="N", help="interleaved runs of each (default: %(default)s)")

    cache = kinds.add_parser(
        "cache",
        help="SSD store and snapshots",
        description="Time the tiers beyond the device, each beside what the disk or TCP can do. Takes about 2 minutes and, while "
        "it runs, 7 GB of the disk of cache.dir, most of it for the index of a million blocks; with --blocks 10000, 10 seconds and 2 GB.",
    )
    cache.add_argument("--prefix", type=int, default=782, metavar="N", help="blocks written and restored at once (default: %(default)s)")
    cache.add_argument("--blocks", type=int, default=1_000_000, metavar="N", help="blocks of the index, 4 KiB each (default: %(default)s)")
    cache.add_argument("--repeats", type=int, default=5, metavar="N", help="interleaved runs of each (default: %(default)s)")

    resume = kinds.add_parser(
        "resume", help="first token by tier", description="Time to the first token of a prompt: cold, from memory, and from SSD."
    )
    resume.add_argument("--tokens", type=int, default=16_384, metavar="N", help="prompt length (default: %(default)s)")
    resume.add_argument("--repeats", type=int, default=5, metavar="N", help="interleaved runs of each (default: %(default)s)")

    frontend = kinds.add_parser(
        "frontend",
        help="what HTTP and text cost",
        description="Run many streams against the server with a backend that only emits tokens: CPU, added latency, memory; and time a "
        "long prompt from bytes to tokens. Beside it, if FastAPI is installed, the same through a usual FastAPI application.",
    )
    frontend.add_argument("--streams", type=int, default=256, metavar="N", help="concurrent streams (default: %(default)s)")
    frontend.add_argument("--rate", type=int, default=2000, metavar="N", help="their tokens per second in total (default: %(default)s)")
    frontend.add_argument("--seconds", type=int, default=10, metavar="N", help="how long they run (default: %(default)s)")
    frontend.add_argument("--open", type=int, default=2500, metavar="N", help="streams held open for their memory (default: %(default)s)")
    frontend.add_argument("--prompt-kb", type=int, default=500, metavar="N", help="size of the long prompt (default: %(default)s)")
    frontend.add_argument("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json (default: the model's)")
    frontend.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds; medians are reported (default: %(default)s)")
    frontend.add_argument("--peer-python", metavar="FILE", help="a Python with litellm[proxy], which is measured beside this server")
    frontend.add_argument("--no-peer", dest="peer", action="store_false", help="only this server")

    quality = kinds.add_parser(
        "quality",
        help="what the model gets right",
        description="Ask held-out exercises of the demo's tasks: recall, prediction of prose, and arithmetic, JSON and tools in several "
        "modes (exact, bounded replays, bf16 KV, dense, …); the other tasks in the default mode only. Short exercises are asked after a "
        "long lead. About an hour on a CPU core; --quick takes minutes.",
    )
    quality.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves (needs matplotlib: the extra `quality`)")
    quality.add_argument("--quick", action="store_true", help="shorter texts, fewer samples and modes")
    quality.add_argument("--only", metavar="PART,…", help="some of text, recall, drift, modes, tasks, effort (default: all)")
    samples = "questions behind each share in the default mode, fewer where they take long (default: 100, with --quick 16)"
    quality.add_argument("--samples", type=int, metavar="N", help=samples)
    quality.add_argument("--seed", type=int, default=1, metavar="N", help="of the exercises (default: %(default)s)")

    restore = kinds.add_parser(
        "restore", help="streams beside a restore", description="Decode many streams while a long prefix comes back from the SSD store."
    )
    restore.add_argument("--tokens", type=int, default=16_384, metavar="N", help="length of the prefix (default: %(default)s)")
    restore.add_argument("--streams", type=int, default=16, metavar="N", help="sequences that decode meanwhile (default: %(default)s)")
    restore.add_argument("--context", type=int, default=256, metavar="N", help="prompt length of each of these (default: %(default)s)")
    restore.add_argument("--steps", type=int, default=64, metavar="N", help="steps timed before each restore (default: %(default)s)")
    restore.add_argument("--repeats", type=int, default=8, metavar="N", help="restores (default: %(default)s)")

    kernels = kinds.add_parser(
        "kernels", help="GPU kernels beside their floors", description="Time every kernel at the sizes of the released model, on a GPU."
    )
    kernels.add_argument("--only", nargs="+", metavar="NAME", help="kernels with one of these in their name (default: all)")
    kernels.add_argument("--tune", action="store_true", help="time the candidates of the attention's tiles instead")
    kernels.add_argument("--budget", type=float, metavar="SECONDS", help="begin no kernel after so long, and say which are left")
    kernels.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to this file")

    step = kinds.add_parser(
        "step",
        help="the network on a GPU beside its floors",
        description="Time decode steps by batch and context, count the kernels of a layer, and time a prefill, all on a GPU and beside "
        "what the bytes and products would take. Sequences get random bytes as their past. By default over a synthetic model.",
    )
    parts = "what to measure, some of step, launches, memory, prefill, torch (default: all)"
    step.add_argument("--part", nargs="+", metavar="PART", help=parts)
    step.add_argument("--layers", type=int, metavar="N", help="of a synthetic model (default: all 40)")
    step.add_argument("--batches", default="1,64,8", metavar="N,N", help="sequences of a decode step (default: %(default)s)")
    step.add_argument("--contexts", default="4096,1000000", metavar="N,N", help="tokens of each sequence (default: %(default)s)")
    most = "no step whose sequences have more tokens together, which must fit in memory (default: %(default)s)"
    step.add_argument("--most-tokens", type=int, default=8_000_000, metavar="N", help=most)
    step.add_argument("--samples", type=int, default=30, metavar="N", help="steps behind a median (default: %(default)s)")
    step.add_argument("--prompt", type=int, default=32_768, metavar="N", help="tokens of a prefill (default: %(default)s)")
    step.add_argument("--chunks", default="4096,8192,2048", metavar="N,N", help="rows of its steps, each tried (default: %(default)s)")
    step.add_argument("--rows", type=int, default=2048, metavar="N", help="of the chunk whose kernels are counted (default: %(default)s)")
    step.add_argument("--repeats", type=int, default=2, metavar="N", help="timed prefills (default: %(default)s)")
    compared = "small model that torch operations run too (default: %(default)s)"
    step.add_argument("--torch-model", default="synthetic:v41-flash,experts=16,layers=6", metavar="MODEL", help=compared)
    step.add_argument("--torch-tokens", type=int, default=256, metavar="N", help="tokens of the prompt it gets (default: %(default)s)")
    step.add_argument("--budget", type=float, metavar="SECONDS", help="begin nothing after so long, and say what is left")
    step.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to this file")

    for kind in (serve, prefill, decode, invariance, cache, resume, frontend, quality, restore, kernels, step):
        kind.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
        _add_settings(kind, listens=False)


def read_settings(args: argparse.Namespace) -> tuple[Config, Origins]:
    """The effective configuration of a command that takes settings.

    Raises:
        ConfigError: see `forebay.server.config.load`; also a `--set` without `=`.
    """
    flags: dict[str, tuple[str, Any]] = {}
    for flag, (key, _, _) in SETTING_FLAGS.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        if value is not None:
            flags[key] = (flag, value)
    for pair in args.set:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes key=value, such as --set engine.max_sequences=16; got {pair!r}")
        flags[key.strip()] = ("--set", value)
    return load(args.config, flags)


def setting_arguments(args: argparse.Namespace) -> list[str]:
    """The command-line arguments that give another `forebay` the settings of this one."""
    given: list[str] = ["--config", str(args.config)] if args.config else []
    for flag in SETTING_FLAGS:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        if value is not None:
            given += [flag, value]
    for pair in args.set:
        given += ["--set", pair]
    return given


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments of one command line.

    Raises:
        ConfigError: unknown command or flag (names the nearest), missing or malformed value.
    """
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is None and not rest:
        parser.print_help()
        raise SystemExit(2)
    if rest:
        known = _chosen(parser, args)._option_string_actions
        long = sorted(flag for flag in known if flag.startswith("--"))
        nearest = difflib.get_close_matches(rest[0].partition("=")[0], long, n=1, cutoff=0.0)
        raise ConfigError(f"{f'{args.command}: ' if args.command else ''}there is no flag {rest[0]!r}; the nearest is {nearest[0]!r}")
    return args


def _chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the innermost command that was named."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and (name := getattr(args, action.dest, None)):
            return _chosen(action.choices[name], args)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 fine, 1 it failed, 2 it was asked wrongly, 130 interrupted."""
    # Idle OpenMP threads must sleep: spinning ones starve the event loop when cores are few. Read by libgomp when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        status: int = importlib.import_module(f"forebay.server.commands.{args.command}").run(args)
        return status
    except ForebayError as error:
        print(f"forebay: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in _OUTPUT_FAULTS:
            raise  # not about a file that the user could look at
        print(f"forebay: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
