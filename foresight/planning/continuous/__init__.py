"""Planning with continuous actions: sampled action sequences, scored by a model or by the simulator."""
