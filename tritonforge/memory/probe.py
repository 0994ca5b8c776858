"""Measures what a decoder's process takes without its engine, in a fresh process of this Python.

`tritonforge plan` calls it where the release is to be served: the engine's figures come from the manifest, these from
the libraries that are installed. No weights are read.
"""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

from tritonforge.errors import EngineFailure
from tritonforge.memory.available import resident_bytes

TIMEOUT_S = 120.0


def measure_base_bytes(folder: Path) -> int:
    """Bytes of Python, libraries, tokenizer and grammars for the decoder in `folder`, a release's version folder."""
    command = [sys.executable, "-m", "tritonforge.memory.probe", str(Path(folder).absolute())]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=root)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EngineFailure(f"the memory of {folder} without its engine could not be measured: {last}")
    return int(done.stdout.split()[-1])


def main(folder: Path) -> None:
    """Load what Decoder loads besides the engine, and print the bytes that this process holds."""
    from tritonforge.decoder import DecoderConfig
    from tritonforge.structured.constraints import Grammars
    from tritonforge.text import Tokenizer

    config = DecoderConfig.read(folder / "decoder.json")
    import_module(f"tritonforge.engines.{config.engine}")
    vocab_size = config.engine_config["vocab_size"]
    kept = Tokenizer(folder), Grammars(folder / "tokenizer.json", vocab_size, config.stop_token_ids)
    used, _ = resident_bytes()
    print(used)
    del kept


if __name__ == "__main__":
    main(Path(sys.argv[1]))
