package profile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"

	"github.com/opencontainers/go-digest"

	"berth/checkpoint/record"
	"berth/internal/errdefs"
)

const (
	directory     = "profiles" // in the image store
	recordKind    = "seccomp-profile"
	recordVersion = 1
)

// maxRefs limits the references of one profile. The oldest is forgotten first.
const maxRefs = 256

// Info describes a stored profile.
type Info struct {
	Digest string   // of the canonical encoding
	Refs   []string // the references that resolved to it, oldest first
	Size   uint64   // bytes of the canonical encoding
}

type entry struct {
	Refs    []string        `json:"refs"`
	Profile json.RawMessage `json:"profile"`
	// Evidence has, for references that a signature policy checked, what it checked.
	Evidence map[string]json.RawMessage `json:"evidence,omitempty"`
}

// Store keeps checked profiles as records. It never contacts a registry.
type Store struct {
	dir  *record.Dir
	turn chan struct{} // holds a token while a change is written

	mu sync.Mutex // guards entries, which are replaced and never changed
	// +checklocks:mu
	entries map[digest.Digest]entry
}

// Open reads the profiles of the image store in root. Damaged records are set aside and returned.
func Open(root string) (*Store, []record.Damaged, error) {
	dir, err := record.OpenDir(filepath.Join(root, directory), recordKind, recordVersion, record.Power)
	if err != nil {
		return nil, nil, fmt.Errorf("open profiles: %w", err)
	}
	entries := map[digest.Digest]entry{}
	damaged, err := dir.Load(func(name string, _ int, body []byte) error {
		e, err := decodeRecord(name, body)
		if err == nil {
			entries[digest.NewDigestFromEncoded(digest.SHA256, name)] = e
		}
		return err
	})
	if err != nil {
		return nil, nil, fmt.Errorf("load profiles: %w", err)
	}
	return &Store{dir: dir, turn: make(chan struct{}, 1), entries: entries}, damaged, nil
}

// Inspect returns the state of the records below root without changing anything. The store may be
// open.
func Inspect(root string) (record.Survey, error) {
	check := func(name string, _ int, body []byte) error {
		_, err := decodeRecord(name, body)
		return err
	}
	return record.Inspect(filepath.Join(root, directory), recordKind, recordVersion, check)
}

// decodeRecord reads the record of the profile with the given hash.
func decodeRecord(hash string, body []byte) (entry, error) {
	var e entry
	if err := json.Unmarshal(body, &e); err != nil {
		return entry{}, err
	}
	if d := digest.FromBytes(e.Profile); d.Encoded() != hash {
		return entry{}, fmt.Errorf("profile has the digest %s", d)
	}
	return e, nil
}

// Add stores a profile that Parse returned, and records that ref resolved to it. evidence is JSON
// that a signature policy can check again, or nil.
func (s *Store) Add(ref string, profile, evidence []byte) error {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	d := digest.FromBytes(profile)
	e := entry{Refs: s.entry(d).Refs, Profile: profile, Evidence: maps.Clone(s.entry(d).Evidence)}
	if slices.Contains(e.Refs, ref) && bytes.Equal(e.Evidence[ref], evidence) {
		return nil
	}
	e.Refs = append(slices.DeleteFunc(slices.Clone(e.Refs), func(r string) bool { return r == ref }), ref)
	e.Refs = e.Refs[max(0, len(e.Refs)-maxRefs):]
	if e.Evidence == nil {
		e.Evidence = map[string]json.RawMessage{}
	}
	maps.DeleteFunc(e.Evidence, func(r string, _ json.RawMessage) bool { return r == ref || !slices.Contains(e.Refs, r) })
	if evidence != nil {
		e.Evidence[ref] = evidence
	}
	if err := s.dir.Write(d.Encoded(), e); err != nil {
		return fmt.Errorf("store profile %s: %w", d, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries[d] = e
	return nil
}

func (s *Store) entry(d digest.Digest) entry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.entries[d]
}

// List returns the stored profiles, ordered by digest.
func (s *Store) List() []Info {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []Info
	for _, d := range slices.Sorted(maps.Keys(s.entries)) {
		e := s.entries[d]
		list = append(list, Info{d.String(), slices.Clone(e.Refs), uint64(len(e.Profile))})
	}
	return list
}

// Get returns the seccomp JSON that ref resolved to, or NotFound.
func (s *Store) Get(ref string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.entries {
		if slices.Contains(e.Refs, ref) {
			return slices.Clone(e.Profile), nil
		}
	}
	return nil, errdefs.NotFound("security profile %s is not present", ref)
}

// Evidence returns what Add recorded for ref, and whether ref is present.
func (s *Store) Evidence(ref string) (evidence []byte, present bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.entries {
		if slices.Contains(e.Refs, ref) {
			return e.Evidence[ref], true
		}
	}
	return nil, false
}

// Remove deletes a profile. A missing profile is no error.
func (s *Store) Remove(d digest.Digest) error {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	if s.entry(d).Profile == nil {
		return nil
	}
	if err := s.dir.Remove(d.Encoded()); err != nil {
		return fmt.Errorf("remove profile %s: %w", d, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.entries, d)
	return nil
}
