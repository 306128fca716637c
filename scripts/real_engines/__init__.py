"""The real SGLang server and its routers on a CPU, as the tests and a curious user start them."""
