"""Makes `python -m tritonforge` the command line."""

from tritonforge.cli import main

raise SystemExit(main())
