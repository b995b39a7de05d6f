"""ZMQ sockets between processes: encryption, allowed peers, threads and limits of logs."""
