package trust

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
	"berth/image/trust/worker"
	"berth/internal/errdefs"
)

// Evidence has an image's documents with their signatures: the indexes, outermost first, and then
// the manifest.
type Evidence struct {
	Documents []Document `json:"documents"`

	accepted bool // a policy has accepted it in this pull
}

// Document is an index or manifest with its signatures, in the form of signature files of package
// worker.
type Document struct {
	Digest     digest.Digest `json:"digest"`
	Raw        []byte        `json:"raw"`
	Signatures [][]byte      `json:"signatures,omitempty"`
}

// Limits of merged evidence. The evidence of one pull may be larger.
const (
	maxDocuments  = 16
	maxSignatures = 128 // of one document
	maxEvidence   = 4 << 20
)

// Merge returns the evidence of a pull together with earlier evidence of the same image. If the
// limits are exceeded, it drops the oldest. Evidence that no policy has accepted replaces nothing,
// because the pod of any namespace can pull it. Both may be nil and do not change.
func (e *Evidence) Merge(earlier *Evidence) *Evidence {
	if e == nil || earlier == nil {
		return cmp.Or(e, earlier)
	}
	if !e.accepted {
		e, earlier = earlier, e
	}
	documents, room := slices.Clone(e.Documents), maxEvidence-e.size()
	for _, old := range slices.Backward(earlier.Documents) {
		i := slices.IndexFunc(documents, func(d Document) bool { return d.Digest == old.Digest })
		if i < 0 && (len(old.Signatures) == 0 || len(documents) >= maxDocuments || old.size() > room) {
			continue
		}
		if i < 0 {
			room -= old.size()
			documents = slices.Insert(documents, 0, old) // the newest manifest stays last
			continue
		}
		merged := &documents[i]
		merged.Signatures = slices.Clip(merged.Signatures)
		for _, s := range old.Signatures {
			known := slices.ContainsFunc(merged.Signatures, func(k []byte) bool { return bytes.Equal(k, s) })
			if !known && len(merged.Signatures) < maxSignatures && len(s) <= room {
				room -= len(s)
				merged.Signatures = append(merged.Signatures, s)
			}
		}
	}
	return &Evidence{documents, e.accepted}
}

func (e *Evidence) size() (n int) {
	for _, d := range e.Documents {
		n += d.size()
	}
	return n
}

// size returns the bytes of a document and its signatures.
func (d Document) size() (n int) {
	n = len(d.Raw)
	for _, s := range d.Signatures {
		n += len(s)
	}
	return n
}

// collect fetches the signatures that the requirements may need.
func (c Config) collect(
	ctx context.Context, needed []requirement, repo Repository, documents []registry.Document,
) (*Evidence, error) {
	evidence := new(Evidence)
	signed, bundle := false, ""
	for _, d := range documents {
		document := Document{Digest: d.Digest, Raw: d.Raw}
		if has(needed, sigstoreSigned) {
			attached, err := repo.Attachments(ctx, d.Digest)
			if err != nil {
				return nil, err
			}
			for _, a := range attached {
				if strings.HasPrefix(a.MediaType, registry.CosignBundle) {
					bundle = errdefs.Clip(a.MediaType)
					continue
				}
				encoded, err := worker.Sigstore(a.MediaType, a.Payload, a.Annotations)
				if err != nil {
					return nil, err
				}
				document.Signatures = append(document.Signatures, encoded)
			}
		}
		if has(needed, signedBy) {
			stored, err := c.lookaside(ctx, repo.Reference(), d.Digest)
			if err != nil {
				return nil, err
			}
			document.Signatures = append(document.Signatures, stored...)
		}
		evidence.Documents = append(evidence.Documents, document)
		signed = signed || len(document.Signatures) > 0
	}
	if !signed && bundle != "" {
		return nil, errdefs.FailedPrecondition("the image has only signatures in the format %s, which berth does not support; "+
			"sign it with: cosign sign --new-bundle-format=false", bundle)
	}
	return evidence, nil
}

// Limits of evidence that only policies of other namespaces need, in time and bytes. Nothing has
// verified it, and the daemon keeps it in memory.
const (
	othersTimeout = 15 * time.Second
	othersSize    = 1 << 20
)

// PullForOthers returns the signatures that Pull does not fetch for a namespace, but that policies
// of other namespaces need. Their containers may use the image without a pull of their own. It
// returns nil if there are none or if it cannot fetch them.
func (v *Verifier) PullForOthers(
	ctx context.Context, c Config, namespace string, repo Repository, documents []registry.Document,
) *Evidence {
	needed, _ := c.needed(namespace, repo.Reference()) // Pull has returned the error
	others := c.neededByOthers(repo.Reference(), needed)
	if others == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, othersTimeout)
	defer cancel()
	found, err := c.collect(ctx, others, repo, documents)
	if err == nil && found.size() > othersSize {
		err = fmt.Errorf("they have more than %d bytes", othersSize)
	}
	if err != nil {
		v.log.Warn("fetch signatures for policies of other namespaces; the pull continues without them",
			"image", repo.Reference().String(), "error", err)
		return nil
	}
	return found
}

// neededByOthers returns the requirements of all policies for an image whose signatures a pull
// under the requirements in needed does not fetch. It ignores policies that are invalid or reject
// the image.
func (c Config) neededByOthers(ref registry.Reference, needed []requirement) (others []requirement) {
	namespaces := []string{""}
	if c.PolicyDir != "" {
		files, _ := filepath.Glob(filepath.Join(c.PolicyDir, "*.json")) // the pattern is valid
		for _, f := range files {
			namespaces = append(namespaces, strings.TrimSuffix(filepath.Base(f), ".json"))
		}
	}
	for _, namespace := range namespaces {
		list, _ := c.needed(namespace, ref)
		for _, kind := range []string{sigstoreSigned, signedBy} {
			if has(list, kind) && !has(needed, kind) && !has(others, kind) {
				others = append(others, requirement{"type": kind})
			}
		}
	}
	return others
}
