package profile

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
)

func refused(t *testing.T, err error, text string) {
	t.Helper()
	if errdefs.Code(err) != codes.InvalidArgument ||
		!strings.HasPrefix(err.Error(), crierrors.ErrSecurityProfileInvalid.Error()+": ") ||
		!strings.Contains(err.Error(), text) {
		t.Errorf("got %v, want a refusal with %q", err, text)
	}
}

const good = `{"defaultAction":"SCMP_ACT_ERRNO","architectures":["SCMP_ARCH_X86_64"],` +
	`"syscalls":[{"names":["read"],"action":"SCMP_ACT_ALLOW",` +
	`"args":[{"index":0,"value":1,"op":"SCMP_CMP_EQ"}]}]}`

func TestParse(t *testing.T) {
	first, err := Parse([]byte(" " + good + "\n"))
	if err != nil || string(first) != good {
		t.Fatalf("got %s, %v, want %s", first, err, good)
	}
	for name, c := range map[string]struct{ old, new, text string }{
		"trailing":     {`}]}]}`, `}]}]}{}`, "after its JSON"},
		"no JSON":      {`{"def`, `"def`, "no seccomp JSON"},
		"unknown":      {`"args"`, `"excludes":{},"args"`, "excludes"},
		"notify":       {"SCMP_ACT_ALLOW", "SCMP_ACT_NOTIFY", "action"},
		"default":      {"SCMP_ACT_ERRNO", "SCMP_ACT_NOTIFY", "default action"},
		"operator":     {"SCMP_CMP_EQ", "SCMP_CMP_X", "operator"},
		"architecture": {"SCMP_ARCH_X86_64", "SCMP_ARCH_X", "architecture"},
		"words":        {`["SCMP_ARCH_X86_64"`, `[` + strings.Repeat(`"SCMP_ARCH_X86",`, maxWords) + `"SCMP_ARCH_X86"`, "65 architectures"},
		"no flags":     {`"syscalls"`, `"flags":[],"syscalls"`, "flags is empty"},
		"killable":     {`"syscalls"`, `"flags":["SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"],"syscalls"`, "flag"},
		"flag":         {`"syscalls"`, `"flags":["X"],"syscalls"`, "flag"},
		"path":         {`"syscalls"`, `"listenerPath":"/x","syscalls"`, "listenerPath"},
		"metadata":     {`"syscalls"`, `"listenerMetadata":"x","syscalls"`, "listenerPath"},
		"no names":     {`["read"]`, `[]`, "no names"},
		"empty name":   {`"read"`, `""`, "0 bytes"},
		"escape":       {`"read"`, `"<"`, "no name of a system call"},
		"long name":    {`"read"`, `"` + strings.Repeat("x", maxName+1) + `"`, "129 bytes"},
		"names":        {`"read"`, strings.Repeat(`"x",`, maxNames) + `"x"`, "names"},
		"index":        {`"index":0`, `"index":6`, "index 6"},
		"args":         {`"args":[`, `"args":[` + strings.Repeat(`{"op":"SCMP_CMP_EQ"},`, maxArgs), "7 args"},
		"rules":        {`[{"names"`, `[` + strings.Repeat(`{},`, maxRules) + `{"names"`, "entries"},
		"values":       {`{"index"`, strings.Repeat(`{},`, maxValues) + `{"index"`, "JSON values"},
		"conditions":   {`{"names"`, strings.Repeat(`{"names":["x"],"action":"SCMP_ACT_LOG","args":[{"op":"SCMP_CMP_EQ"}]},`, maxConditions) + `{"names"`, "512 conditions"},
		"size":         {`{"def`, strings.Repeat(" ", MaxSize) + `{"def`, "bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(strings.Replace(good, c.old, c.new, 1)))
			refused(t, err, c.text)
		})
	}
}

// Confirm accepts what Parse returns, and nothing that Parse refuses or would change.
func TestConfirm(t *testing.T) {
	if err := Confirm([]byte(good)); err != nil {
		t.Error(err)
	}
	if err := Confirm([]byte(good + "\n")); err == nil {
		t.Error("another encoding is accepted")
	}
	err := Confirm([]byte(strings.Replace(good, "SCMP_ACT_ALLOW", "SCMP_ACT_NOTIFY", 1)))
	refused(t, err, "action")
}

func TestCheckManifest(t *testing.T) {
	digest := "sha256:" + strings.Repeat("a", 64)
	layer := fmt.Sprintf(`{"mediaType":"x","digest":%q,"size":10}`, digest)
	manifest := `{"schemaVersion":2,"config":{"mediaType":"` + MediaType + `"},"layers":[` + layer + `]}`
	l, err := CheckManifest([]byte(manifest))
	if err != nil || l.Digest.String() != digest || l.Size != 10 {
		t.Fatalf("got %v, %v", l, err)
	}
	byType := strings.Replace(manifest, `"config":{"mediaType"`, `"config":{},"artifactType"`, 1)
	byType = strings.Replace(byType, `json"},`, `json",`, 1)
	if _, err := CheckManifest([]byte(byType)); err != nil {
		t.Errorf("artifactType: %v", err)
	}
	for name, c := range map[string]struct{ old, new, text string }{
		"index":      {`:2,`, `:2,"mediaType":"application/vnd.oci.image.index.v1+json",`, "no OCI image"},
		"schema":     {`:2,`, `:1,`, "no OCI image"},
		"type":       {MediaType, "x", "media type"},
		"no layer":   {layer, "", "0 layers"},
		"two layers": {layer, layer + "," + layer, "2 layers"},
		"digest":     {digest, "x", "digest"},
		"big layer":  {`"size":10`, `"size":1048577`, "1048577 bytes"},
		"no size":    {`"size":10`, `"size":0`, "0 bytes"},
		"no JSON":    {`{"sch`, `"sch`, "no JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := CheckManifest([]byte(strings.Replace(manifest, c.old, c.new, 1)))
			refused(t, err, c.text)
		})
	}
}

// FuzzProfile checks that the canonical encoding is accepted again and does not change.
func FuzzProfile(f *testing.F) {
	f.Add([]byte(good))
	f.Fuzz(func(t *testing.T, data []byte) {
		out, err := Parse(data)
		if err != nil {
			return
		}
		if err := Confirm(out); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
	})
}
