package trust

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"berth/image/registry"
	"berth/internal/testutil"
)

// documentOf returns a document with signatures.
func documentOf(raw string, signatures ...string) Document {
	d := Document{Digest: digest.FromString(raw), Raw: []byte(raw)}
	for _, s := range signatures {
		d.Signatures = append(d.Signatures, []byte(s))
	}
	return d
}

// describe returns documents and signatures as a text: "index: a b, manifest: c".
func describe(e *Evidence) string {
	var list []string
	for _, d := range e.Documents {
		list = append(list, fmt.Sprintf("%s: %s", d.Raw, bytes.Join(d.Signatures, []byte(" "))))
	}
	return strings.Join(list, ", ")
}

func TestMergeEvidence(t *testing.T) {
	t.Parallel()
	of := func(accepted bool, documents ...Document) *Evidence { return &Evidence{documents, accepted} }
	kept := of(false, documentOf("old index", "a"), documentOf("manifest", "b", "c"))
	for _, tc := range []struct {
		name string
		pull *Evidence
		want string
	}{
		{"another name", of(true, documentOf("manifest", "d", "b")), "old index: a, manifest: d b c"},
		{"another index", of(true, documentOf("new index", "d"), documentOf("manifest")), "old index: a, new index: d, manifest: b c"},
		{"not accepted", of(false, documentOf("new index", "d"), documentOf("manifest", "e")),
			"new index: d, old index: a, manifest: b c e"},
		{"the same", kept, "old index: a, manifest: b c"},
		{"nothing signed", of(false, documentOf("new index"), documentOf("manifest")), "old index: a, manifest: b c"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if got := describe(tc.pull.Merge(kept)); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
	if kept.Merge(nil) != kept || (*Evidence)(nil).Merge(kept) != kept || describe(kept) != "old index: a, manifest: b c" {
		t.Errorf("merging changed %q, or nothing did", describe(kept))
	}
}

// Accepted evidence stays whole when it meets a limit. Of the others the oldest go.
func TestMergedEvidenceIsLimited(t *testing.T) {
	t.Parallel()
	var kept *Evidence
	for i := range 2 * maxDocuments {
		pulled := &Evidence{[]Document{documentOf(fmt.Sprintf("index %d", i), "s")}, true}
		kept = pulled.Merge(kept)
		if last := kept.Documents[len(kept.Documents)-1]; string(last.Raw) != fmt.Sprintf("index %d", i) {
			t.Fatalf("pull %d is followed by %q", i, last.Raw)
		}
	}
	if len(kept.Documents) != maxDocuments || string(kept.Documents[0].Raw) != fmt.Sprintf("index %d", maxDocuments) {
		t.Errorf("kept %s", describe(kept))
	}
	large := documentOf("large", strings.Repeat("x", maxEvidence))
	if got := (&Evidence{[]Document{large}, false}).Merge(kept); describe(got) != describe(kept) {
		t.Errorf("what no policy has accepted has changed the evidence to %d documents", len(got.Documents))
	}
	if got := (&Evidence{[]Document{large}, true}).Merge(kept); len(got.Documents) != 1 {
		t.Errorf("%d documents beside a large one", len(got.Documents))
	}
	pulled := documentOf("index 0")
	for i := range 2 * maxSignatures {
		pulled.Signatures = [][]byte{fmt.Append(nil, i)}
		kept = (&Evidence{[]Document{pulled}, true}).Merge(kept)
	}
	if signatures := kept.Documents[len(kept.Documents)-1].Signatures; len(signatures) != maxSignatures ||
		string(signatures[0]) != fmt.Sprint(2*maxSignatures-1) {
		t.Errorf("%d signatures, the first is %q", len(signatures), signatures[0])
	}
}

// signedRepository has one signature of each document, or fails.
type signedRepository struct{ err error }

func (signedRepository) Reference() registry.Reference {
	return registry.Reference{Domain: "r.example", Repository: "app", Tag: "v1"}
}

func (r signedRepository) Attachments(context.Context, digest.Digest) ([]registry.Attachment, error) {
	return []registry.Attachment{{MediaType: "application/vnd.dev.cosign.simplesigning.v1+json", Payload: []byte("{}")}}, r.err
}

// A pull for a namespace that needs no signatures keeps those that another one needs. It never
// fails because of them.
func TestPullKeepsSignaturesForOtherNamespaces(t *testing.T) {
	t.Parallel()
	const free, strict = `{"default": [{"type": "insecureAcceptAnything"}]}`, `{"default": [{"type": "sigstoreSigned"}]}`
	documents := []registry.Document{{Digest: digest.FromString("{}"), Raw: []byte("{}")}}
	for _, tc := range []struct {
		name   string
		others map[string]string
		err    error
		want   bool
	}{
		{"nobody needs them", map[string]string{"a.json": free}, nil, false},
		{"one needs them", map[string]string{"a.json": free, "b.json": strict}, nil, true},
		{"an invalid policy", map[string]string{"a.json": "{", "b.json": strict}, nil, true},
		{"no answer", map[string]string{"b.json": strict}, errors.New("no answer"), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			testutil.Must(t, os.WriteFile(filepath.Join(dir, "policy"), []byte(free), 0o600))
			for name, text := range tc.others {
				testutil.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
			}
			c := Config{Policy: filepath.Join(dir, "policy"), PolicyDir: dir}
			v, repo := New(slog.New(slog.DiscardHandler)), signedRepository{tc.err}
			if found, err := v.Pull(t.Context(), c, "", repo, documents); err != nil || found != nil {
				t.Fatalf("got %+v, %v", found, err)
			}
			found := v.PullForOthers(t.Context(), c, "", repo, documents)
			if (found != nil) != tc.want {
				t.Fatalf("got %+v", found)
			}
			if found != nil && len(found.Documents[0].Signatures) != 1 {
				t.Errorf("signatures %q", found.Documents[0].Signatures)
			}
		})
	}
}
