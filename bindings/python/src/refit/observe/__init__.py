"""Progress bars, loggers and timelines, which are told what the other rooms do."""
