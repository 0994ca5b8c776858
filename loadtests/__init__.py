"""Load campaigns that decide whether a service meets its contract: open-loop load, raw records, statistics, verdict."""
