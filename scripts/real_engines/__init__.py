"""Start the real SGLang server and its routers on a CPU, for the tests and for users."""
