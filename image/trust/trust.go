// Package trust decides whether a node may use an image. It applies a policy.json
// (containers-policy.json(5)) and verifier plugins in containerd's protocol.
//
// # Contract
//
// The daemon selects the requirements for an image and collects documents, signatures and keys. The
// program berth-verify checks them, in a confined process without network (package worker). Every
// error rejects the image, for example an unreadable policy or key, a registry that does not
// answer, or a helper that dies. Signatures may sign the manifest of the node's platform or the
// index that the image's name leads to.
//
// Evidence is an image's documents and signatures. With the evidence a policy can check the image
// again without the registry. The image store keeps it with the image, because CreateContainer
// checks images that were pulled under another policy.
//
// Rejections are *RejectedError.
package trust

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os/exec"
	"path"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
	"berth/image/trust/worker"
	"berth/internal/errdefs"
)

// Config is the configuration of a Verifier. The zero value accepts all images.
type Config struct {
	Policy        string        // policy.json; empty: none
	PolicyDir     string        // policies of namespaces, <namespace>.json, that replace Policy; empty: none
	RegistriesDir string        // containers-registries.d(5): lookaside stores of OpenPGP signatures; empty: none
	Program       string        // path of berth-verify; empty: found in PATH
	PluginDir     string        // verifier plugins; empty: none
	MaxPlugins    int           // an image is rejected if there are more
	PluginTimeout time.Duration // of each plugin
}

// RejectedError says that an image is not accepted.
type RejectedError struct{ Reason error }

func (e *RejectedError) Error() string { return e.Reason.Error() }
func (e *RejectedError) Unwrap() error { return e.Reason }

func rejected(format string, args ...any) error { return &RejectedError{fmt.Errorf(format, args...)} }

// Repository has the signatures of an image. *registry.Repository implements it.
type Repository interface {
	Reference() registry.Reference
	Attachments(ctx context.Context, d digest.Digest) ([]registry.Attachment, error)
}

// Verifier checks images. Its methods may be called concurrently.
type Verifier struct {
	log *slog.Logger

	mu sync.Mutex
	// +checklocks:mu
	accepted map[[sha256.Size]byte]bool
}

// New returns a verifier.
func New(log *slog.Logger) *Verifier {
	return &Verifier{log: log, accepted: map[[sha256.Size]byte]bool{}}
}

// Check returns an error unless a daemon can use a configuration. The policy must be valid, and the
// program must exist.
func (c Config) Check() error {
	if c.Policy == "" && c.PolicyDir == "" {
		return nil
	}
	if _, err := c.readPolicy(""); err != nil {
		return errdefs.FailedPrecondition("signature policy: %w", err)
	}
	if _, err := exec.LookPath(c.program()); err != nil {
		return errdefs.FailedPrecondition("signature policy: find berth-verify: %w", err)
	}
	return nil
}

func (c Config) program() string {
	if c.Program == "" {
		return "berth-verify"
	}
	return c.Program
}

// Pull checks an image before its layers are fetched. namespace is the pod's, or "". It returns the
// evidence to keep, or nil if the policy needs no evidence.
func (v *Verifier) Pull(
	ctx context.Context, c Config, namespace string, repo Repository, documents []registry.Document,
) (*Evidence, error) {
	ref := repo.Reference()
	needed, err := c.needed(namespace, ref)
	if err != nil {
		return nil, err
	}
	var evidence *Evidence
	if needed != nil {
		if evidence, err = c.collect(ctx, needed, repo, documents); err != nil {
			return nil, rejected("fetch signatures: %w", err)
		}
		if err := v.verify(ctx, c, needed, ref, evidence); err != nil {
			return nil, err
		}
		evidence.accepted = true
	}
	return evidence, c.runPlugins(ctx, ref, documents[0])
}

// Use checks an image of the node before a container uses it by one of its names. kept is nil if
// there is no evidence. Plugins do not run again.
func (v *Verifier) Use(ctx context.Context, c Config, namespace string, ref registry.Reference, kept *Evidence) error {
	needed, err := c.needed(namespace, ref)
	if err != nil || needed == nil {
		return err
	}
	if kept == nil {
		return rejected("the image was pulled without its signatures; remove it and pull it again")
	}
	return v.verify(ctx, c, needed, ref, kept)
}

// needed returns the requirements for an image, or nil if the policy accepts it without signatures.
func (c Config) needed(namespace string, ref registry.Reference) ([]requirement, error) {
	p, err := c.readPolicy(namespace)
	if err != nil {
		return nil, rejected("signature policy: %w", err)
	}
	if p == nil {
		return nil, nil
	}
	list, err := p.requirements(ref)
	switch {
	case err != nil:
		return nil, rejected("signature policy: %w", err)
	case all(list, acceptAnything):
		return nil, nil
	case has(list, rejectAll):
		return nil, rejected("the policy rejects images of this name")
	}
	return list, nil
}

// maxAccepted limits the remembered verdicts.
const maxAccepted = 4096

// verify runs berth-verify, unless it has accepted the same documents under the same policy and
// keys before.
func (v *Verifier) verify(
	ctx context.Context, c Config, needed []requirement, ref registry.Reference, evidence *Evidence,
) error {
	content := files{worker.ReferenceFile: []byte(ref.String())}
	if err := content.putPolicy(needed); err != nil {
		return rejected("signature policy: %w", err)
	}
	for i, d := range evidence.Documents {
		dir := strconv.Itoa(i)
		content[path.Join(dir, "manifest.json")] = d.Raw
		for n, signature := range d.Signatures {
			content[path.Join(dir, fmt.Sprintf("signature-%d", n+1))] = signature
		}
	}
	key, err := content.sum()
	if err != nil {
		return err
	}
	if v.isAccepted(key) {
		return nil
	}
	verdict, err := run(ctx, c.program(), content)
	switch {
	case err != nil:
		return rejected("verify signatures: %w", err)
	case !verdict.Accepted:
		return rejected("%s", errdefs.Clip(verdict.Reason))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.accepted) >= maxAccepted {
		clear(v.accepted)
	}
	v.accepted[key] = true
	return nil
}

func (v *Verifier) isAccepted(key [sha256.Size]byte) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.accepted[key]
}

// sum returns a digest of all files and their names.
func (f files) sum() (sum [sha256.Size]byte, err error) {
	h := sha256.New()
	encoder := json.NewEncoder(h)
	for _, name := range slices.Sorted(maps.Keys(f)) {
		if err := errors.Join(encoder.Encode(name), encoder.Encode(f[name])); err != nil {
			return sum, err
		}
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}
