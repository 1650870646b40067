"""Sessions at run time: generate loop, sampling, expert tiers, orchestrator. Works on token ids, knows no text."""
