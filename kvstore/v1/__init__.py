"""Generated from proto/kvstore/v1 by `make proto`; nothing here is written by hand."""
