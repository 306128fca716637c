"""SGLang over HTTP: token ids in, one checked generation out, tried again where that helps."""
