package image

import (
	"errors"

	"berth/image/registry"
	"berth/image/trust"
)

// Settings are the options of a store that can change while it is open.
type Settings struct {
	Registries registry.Sources
	Pinned     []string // references or IDs of images that kubelet must not collect
	Trust      trust.Config
}

// Check returns an error for settings that Prepare refuses.
func (s Settings) Check() error {
	_, pinned := pinnedNames(s.Pinned)
	return errors.Join(pinned, s.Registries.Check(), s.Trust.Check())
}

// Prepare checks new settings and returns the function that applies them. Pulls that run keep
// their registries. Errors: InvalidArgument, FailedPrecondition.
func (s *Store) Prepare(next Settings) (apply func(), err error) {
	pinned, err := pinnedNames(next.Pinned)
	if err != nil {
		return nil, err
	}
	setRegistries, err := s.cfg.Client.Prepare(next.Registries)
	if err != nil {
		return nil, err
	}
	if err := next.Trust.Check(); err != nil {
		return nil, err
	}
	return func() {
		setRegistries()
		s.signatures.config.Store(&next.Trust)
		s.writing <- struct{}{}
		defer func() { <-s.writing }()
		s.pinned = pinned
		s.snapshot.Store(newSnapshot(s.Snapshot().records, nil, pinned)) // no records of old versions, which would have a pin each
	}, nil
}
