"""Where a run lives: command line, configuration, driver, placement."""
