"""The state of a model beside the values of its tensors: containers, generators, fingerprints, snapshots."""
