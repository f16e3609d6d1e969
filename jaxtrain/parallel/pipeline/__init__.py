"""Pipeline parallelism in one SPMD program: tick tables and the executor that runs them."""
