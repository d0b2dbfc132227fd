package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/checkpoint/record"
	"berth/image/registry"
	"berth/image/trust"
	"berth/internal/errdefs"
)

// Directory, kind and schema version of the records with the documents and signatures of images.
const (
	evidenceDir     = "signatures"
	evidenceKind    = "signatures"
	evidenceVersion = 1
)

// signatures checks images by the configured policy. It keeps the evidence of images that were
// pulled under a policy with signatures.
type signatures struct {
	verifier *trust.Verifier
	config   atomic.Pointer[trust.Config]
	records  *record.Dir

	mu sync.Mutex
	// +checklocks:mu
	kept map[string]*trust.Evidence
}

// openSignatures reads the evidence in the image store at root. Damaged evidence is set aside; its
// images must be pulled again.
func openSignatures(root string, c trust.Config, log *slog.Logger) (*signatures, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	records, err := record.OpenDir(filepath.Join(root, evidenceDir), evidenceKind, evidenceVersion, record.Power)
	if err != nil {
		return nil, err
	}
	kept := map[string]*trust.Evidence{}
	damaged, err := records.Load(func(name string, _ int, body []byte) error {
		evidence := new(trust.Evidence)
		kept["sha256:"+name] = evidence
		return json.Unmarshal(body, evidence)
	})
	for _, d := range damaged {
		delete(kept, "sha256:"+d.Name)
		log.Error("record of image signatures set aside; the image must be pulled again", "image", d.Name, "file", d.Path,
			"error", d.Err)
	}
	s := &signatures{verifier: trust.New(log), records: records, kept: kept}
	s.config.Store(&c)
	return s, err
}

// keep adds to the evidence of an image, because other names or namespaces may need what earlier
// pulls have found. evidence may be nil. The caller holds the writer's lock of the store.
func (s *signatures) keep(id string, evidence *trust.Evidence) error {
	if evidence == nil {
		return nil
	}
	evidence = evidence.Merge(s.of(id))
	if err := s.records.Write(recordName(id), evidence); err != nil {
		return fmt.Errorf("record signatures: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept[id] = evidence
	return nil
}

func (s *signatures) of(id string) *trust.Evidence {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kept[id]
}

// forget deletes the evidence of a removed image. An error does no harm, because forgetAllBut tries
// again.
func (s *signatures) forget(id string) error {
	if s.of(id) == nil {
		return nil
	}
	s.mu.Lock()
	delete(s.kept, id)
	s.mu.Unlock()
	return s.records.Remove(recordName(id))
}

// forgetAllBut deletes the evidence of images that do not exist.
func (s *signatures) forgetAllBut(images map[string]imageRecord) (failed error) {
	s.mu.Lock()
	known := slices.Collect(maps.Keys(s.kept))
	s.mu.Unlock()
	for _, id := range known {
		if _, ok := images[id]; !ok {
			failed = errors.Join(failed, s.forget(id))
		}
	}
	return failed
}

// mayReuse reports whether a present image passes without new requests to the registry. If there
// are plugins, it does not, because they have to see every pull.
func (s *signatures) mayReuse(ctx context.Context, namespace string, ref registry.Reference, id string) bool {
	c := *s.config.Load()
	return c.PluginDir == "" && s.verifier.Use(ctx, c, namespace, ref, s.of(id)) == nil
}

// Verify checks whether a container in a namespace may use an image. written is the name in the
// pod's spec, if known. The check uses the written name if it names the image, else all names of
// the image. The error has the text that kubelet expects (SignatureValidationFailed).
func (s *Store) Verify(ctx context.Context, img *Image, written, namespace string) error {
	c := *s.signatures.config.Load()
	if c.Policy == "" && c.PolicyDir == "" {
		return nil
	}
	err := error(&trust.RejectedError{Reason: errors.New("the image has no name that a policy could accept")})
	for _, ref := range s.namesOf(img, written) {
		if err = s.signatures.verifier.Use(ctx, c, namespace, ref, s.signatures.of(img.ID)); err == nil {
			return nil
		}
	}
	return SignatureError("image "+img.ID, err)
}

// namesOf returns the names under which Verify checks an image.
func (s *Store) namesOf(img *Image, written string) (names []registry.Reference) {
	x := s.Snapshot()
	if candidates, err := s.cfg.Client.Candidates(written); err == nil {
		for _, ref := range candidates {
			if found := x.byName[ref.String()]; found != nil && found.ID == img.ID {
				return []registry.Reference{ref}
			}
		}
	}
	for _, name := range slices.Concat(img.RepoTags, img.RepoDigests) {
		if ref, err := registry.ParseReference(name); err == nil {
			names = append(names, ref)
		}
	}
	return names
}

// CheckPull checks an image that a pull has resolved, and returns the evidence to keep with it, for
// all namespaces. See trust.Verifier.Pull.
func (s *Store) CheckPull(ctx context.Context, namespace string, repo *registry.Repository,
	img *registry.Image) (*trust.Evidence, error) {
	c, v := *s.signatures.config.Load(), s.signatures.verifier
	evidence, err := v.Pull(ctx, c, namespace, repo, img.Documents)
	if err != nil {
		return nil, err
	}
	return evidence.Merge(v.PullForOthers(ctx, c, namespace, repo, img.Documents)), nil
}

// CheckProfile is CheckPull for the manifest of a security profile. Each pod pulls its profiles, so
// the evidence is for one namespace.
func (s *Store) CheckProfile(ctx context.Context, namespace string, repo *registry.Repository,
	manifest registry.Document) (*trust.Evidence, error) {
	return s.signatures.verifier.Pull(ctx, *s.signatures.config.Load(), namespace, repo, []registry.Document{manifest})
}

// MayReuse reports whether a present image passes the policy without new requests to the registry.
func (s *Store) MayReuse(ctx context.Context, namespace string, ref registry.Reference, id string) bool {
	return s.signatures.mayReuse(ctx, namespace, ref, id)
}

// MayReuseProfile is MayReuse for a security profile, whose evidence package profile keeps.
func (s *Store) MayReuseProfile(ctx context.Context, namespace string, ref registry.Reference,
	kept *trust.Evidence) bool {
	c := *s.signatures.config.Load()
	return c.PluginDir == "" && s.signatures.verifier.Use(ctx, c, namespace, ref, kept) == nil
}

// SignatureError gives a rejection the form that kubelet recognizes: codes.Unknown and a text that
// begins with SignatureValidationFailed.
func SignatureError(what string, err error) error {
	return errdefs.New(codes.Unknown, "%w: %s: %w", crierrors.ErrSignatureValidationFailed, what, err)
}
