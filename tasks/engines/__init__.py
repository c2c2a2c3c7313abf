"""How a reload is asked of an engine; one kind of engine a file. Must not know replicas, stores or Prefect."""
