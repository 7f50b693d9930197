"""One model on many processes: embedding tables shared out, dense layers data parallel."""
