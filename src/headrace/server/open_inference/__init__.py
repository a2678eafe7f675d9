"""The Open Inference Protocol (KServe v2) over gRPC: another pair of ends for the same parse, engine and answer as HTTP has."""
