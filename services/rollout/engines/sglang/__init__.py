"""SGLang's HTTP server as an engine."""
