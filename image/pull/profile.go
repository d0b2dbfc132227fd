package pull

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/image/profile"
	"berth/image/registry"
	"berth/image/trust"
	"berth/internal/errdefs"
)

// ProfileChecker checks a seccomp profile in a process with the root directory dir, and returns its
// canonical encoding.
type ProfileChecker func(ctx context.Context, dir string, data []byte) ([]byte, error)

func openProfiles(root string, log *slog.Logger) (*profile.Store, error) {
	store, damaged, err := profile.Open(root)
	for _, d := range damaged {
		log.Error("record of a security profile set aside; the profile must be pulled again", "profile", d.Name,
			"file", d.Path, "error", d.Err)
	}
	return store, err
}

// Profiles returns the store of security profiles.
func (p *Puller) Profiles() *profile.Store { return p.profiles }

// PullProfile pulls a seccomp profile by a digest-pinned reference (KEP-6061). cached reports that
// no registry was asked. A present profile is pulled again only if the signature policy of the
// namespace rejects what the earlier pull has verified. Errors are those of PullFor, and
// InvalidArgument with the prefix SecurityProfileInvalid for a permanent refusal.
func (p *Puller) PullProfile(ctx context.Context, namespace, name string,
	auth *runtimeapi.AuthConfig) (cached bool, err error) {
	ref, err := registry.ParseReference(name)
	switch {
	case err != nil:
		return false, profile.Invalid("%v", err)
	case ref.Digest == "" || name != ref.String():
		return false, profile.Invalid("reference %q is not canonical with a digest", errdefs.Clip(name))
	}
	track, err := p.pulls.start(name)
	if err != nil {
		return false, fmt.Errorf("pull %s: %w", name, err)
	}
	defer p.pulls.end(track)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	if p.mayReuseProfile(ctx, namespace, name, ref) {
		return true, nil
	}
	content, evidence, err := p.fetchProfile(ctx, namespace, ref, auth)
	if errors.Is(err, crierrors.ErrSecurityProfileInvalid) {
		return false, err // the text must begin with SecurityProfileInvalid
	}
	if err != nil {
		return false, pullError(name, err)
	}
	return false, p.profiles.Add(name, content, evidence)
}

func (p *Puller) mayReuseProfile(ctx context.Context, namespace, name string, ref registry.Reference) bool {
	raw, present := p.profiles.Evidence(name)
	if !present {
		return false
	}
	var kept *trust.Evidence
	if raw != nil && json.Unmarshal(raw, &kept) != nil {
		return false
	}
	return p.store.MayReuseProfile(ctx, namespace, ref, kept)
}

// fetchProfile returns the canonical profile and the evidence of its signatures, nil for none.
func (p *Puller) fetchProfile(ctx context.Context, namespace string, ref registry.Reference,
	auth *runtimeapi.AuthConfig) (content, evidence []byte, err error) {
	credentials, err := registry.FromCRI(auth)
	if err != nil {
		return nil, nil, fmt.Errorf("credentials: %v", err) // no InvalidArgument: kubelet must retry
	}
	repo, err := p.client.Open(ref, credentials)
	if err != nil {
		return nil, nil, err
	}
	defer repo.Close()
	// A longer answer is no SecurityProfileInvalid: its digest is unknown, so a broken mirror may
	// have sent it.
	doc, err := repo.Manifest(ctx, profile.MaxManifest)
	if err != nil {
		return nil, nil, err
	}
	blob, err := profile.CheckManifest(doc.Raw)
	if err != nil {
		return nil, nil, err
	}
	verified, err := p.store.CheckProfile(ctx, namespace, repo, doc)
	if err != nil {
		return nil, nil, err
	}
	if verified != nil {
		if evidence, err = json.Marshal(verified); err != nil {
			return nil, nil, fmt.Errorf("encode signatures: %w", err)
		}
	}
	data, err := repo.Document(ctx, blob, profile.MaxSize)
	if err != nil {
		return nil, nil, err
	}
	if p.cfg.Profile == nil {
		return nil, nil, errdefs.FailedPrecondition("no program checks security profiles")
	}
	content, err = p.cfg.Profile(ctx, p.store.Spool(), data)
	return content, evidence, err
}
