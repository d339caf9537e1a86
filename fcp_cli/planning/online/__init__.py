"""Planning beside a training that knows its sequences only when they come."""
