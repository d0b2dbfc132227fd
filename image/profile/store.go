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
	"google.golang.org/grpc/codes"

	"berth/checkpoint/record"
	"berth/internal/errdefs"
)

const (
	directory     = "profiles" // in the image store
	recordKind    = "seccomp-profile"
	recordVersion = 1
)

// Limits of all profiles together. They bound the daemon's memory, the answer of
// ListSecurityProfiles and the size of a record. No reference is forgotten instead, because kubelet
// finds a profile that a pod uses by its references.
const (
	maxRefs  = 4096
	maxBytes = 32 << 20 // of profiles, references and evidence
)

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

	maxRefs  int // of all profiles
	maxBytes int

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
	s := &Store{dir: dir, turn: make(chan struct{}, 1), maxRefs: maxRefs, maxBytes: maxBytes, entries: entries}
	return s, damaged, nil
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
	if err := Confirm(e.Profile); err != nil {
		return entry{}, err
	}
	return e, nil
}

// Add stores a profile that Parse returned, and records that ref resolved to it. evidence is JSON
// that a signature policy can check again, or nil for none: earlier evidence stays valid, because
// ref is pinned. Beyond the limits of all profiles, the error is ResourceExhausted.
func (s *Store) Add(ref string, profile, evidence []byte) error {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	d := digest.FromBytes(profile)
	old := s.entry(d)
	if slices.Contains(old.Refs, ref) && (evidence == nil || bytes.Equal(old.Evidence[ref], evidence)) {
		return nil
	}
	e := entry{Refs: slices.Clone(old.Refs), Profile: profile, Evidence: maps.Clone(old.Evidence)}
	if !slices.Contains(e.Refs, ref) {
		e.Refs = append(e.Refs, ref)
	}
	if evidence != nil {
		if e.Evidence == nil {
			e.Evidence = map[string]json.RawMessage{}
		}
		e.Evidence[ref] = evidence
	}
	if err := s.checkRoom(d, e); err != nil {
		return err
	}
	if err := s.dir.Write(d.Encoded(), e); err != nil {
		return fmt.Errorf("store profile %s: %w", d, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries[d] = e
	return nil
}

// checkRoom returns an error if all profiles together exceed a limit with e as the profile d.
func (s *Store) checkRoom(d digest.Digest, e entry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	refs, size := len(e.Refs), e.size()
	for other, o := range s.entries {
		if other != d {
			refs, size = refs+len(o.Refs), size+o.size()
		}
	}
	what, have, limit := "references", refs, s.maxRefs
	if refs <= s.maxRefs {
		what, have, limit = "bytes with their signatures", size, s.maxBytes
	}
	if have <= limit {
		return nil
	}
	return errdefs.New(codes.ResourceExhausted, "all security profiles would have %d %s, the limit is %d: "+
		"remove unused profiles with RemoveSecurityProfile (berth image profiles --rm)", have, what, limit)
}

// size returns the bytes that count for maxBytes.
func (e entry) size() int {
	n := len(e.Profile)
	for _, ref := range e.Refs {
		n += len(ref) + len(e.Evidence[ref])
	}
	return n
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
