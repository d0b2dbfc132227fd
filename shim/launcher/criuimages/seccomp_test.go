package criuimages_test

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	"google.golang.org/protobuf/proto"

	"berth/checkpoint/verify/verifytest"
	"berth/internal/testutil"
	"berth/shim/launcher/criuimages"
)

const cores, seccomps = 0x55053847, 0x64413049

// filtered describes a thread with a filter.
func filtered(index uint32) *criu_core.CoreEntry {
	return &criu_core.CoreEntry{ThreadCore: &criu_core.ThreadCoreEntry{
		SeccompMode: criu_core.SeccompMode_filter.Enum(), SeccompFilter: &index}}
}

// filterImages writes images with the filters "good", "more" after it, "bad", "good" after it, and
// two that follow each other.
func filterImages(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	list := &seccomp.SeccompEntry{}
	for _, f := range []struct {
		program string
		prev    *uint32
	}{
		{"good", nil}, {"more", proto.Uint32(0)}, {"bad", nil}, {"good", proto.Uint32(2)},
		{"good", proto.Uint32(5)}, {"good", proto.Uint32(4)}, {"good", proto.Uint32(99)},
	} {
		list.SeccompFilters = append(list.SeccompFilters, &seccomp.SeccompFilter{Filter: []byte(f.program), Prev: f.prev})
	}
	image(t, dir, "seccomp.img", seccomps, list)
	return dir
}

// TestCheckFilters checks one thread at a time.
func TestCheckFilters(t *testing.T) {
	t.Parallel()
	const another = "thread 7 has another seccomp filter than the container's spec"
	none := &criu_core.CoreEntry{ThreadCore: &criu_core.ThreadCoreEntry{SeccompMode: criu_core.SeccompMode_disabled.Enum()}}
	old := filtered(0)
	old.Tc = &criu_core.TaskCoreEntry{OldSeccompMode: criu_core.SeccompMode_filter.Enum()}
	oldIndex := filtered(0)
	oldIndex.Tc = &criu_core.TaskCoreEntry{OldSeccompFilter: proto.Uint32(2)}
	for _, tc := range []struct {
		name    string
		core    *criu_core.CoreEntry
		filters int
		refused string
	}{
		{"filter of the spec", filtered(0), 1, ""},
		{"one more", filtered(1), 2, ""},
		{"no filter", none, 0, ""},
		{"no thread", &criu_core.CoreEntry{}, 0, ""},
		{"another filter", filtered(2), 0, another},
		{"filter of the spec after another", filtered(3), 0, another},
		{"endless chain", filtered(4), 0, another},
		{"chain to nowhere", filtered(6), 0, another},
		{"missing filter", filtered(7), 0, another},
		{"index without a sign", filtered(1<<32 - 1), 0, another},
		{"mode of an old CRIU", old, 0, "core-7.img has a seccomp filter in the form of an old CRIU"},
		{"filter of an old CRIU", oldIndex, 0, "core-7.img has a seccomp filter in the form of an old CRIU"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := filterImages(t)
			image(t, dir, "core-7.img", cores, tc.core)
			want := criuimages.Filters{}
			if tc.filters > 0 {
				want[7] = tc.filters
			}
			got, err := criuimages.CheckFilters(verifytest.Open(t, dir), [][]byte{[]byte("other"), []byte("good")})
			var refused *criuimages.Refused
			switch {
			case tc.refused != "" && (!errors.As(err, &refused) || refused.Reason != tc.refused):
				t.Errorf("%v, want %q", err, tc.refused)
			case tc.refused == "" && (err != nil || !maps.Equal(got, want)):
				t.Errorf("%v, %v; want %v", got, err, want)
			}
		})
	}
}

// Several messages of a field are one, as for CRIU: the second does not hide the filter of the
// first.
func TestFilterInTwoParts(t *testing.T) {
	t.Parallel()
	first, err := proto.MarshalOptions{AllowPartial: true}.Marshal(filtered(2))
	testutil.Must(t, err)
	second, err := proto.MarshalOptions{AllowPartial: true}.Marshal(&criu_core.CoreEntry{ThreadCore: &criu_core.ThreadCoreEntry{Comm: proto.String("x")}})
	testutil.Must(t, err)
	both := new(criu_core.CoreEntry)
	testutil.Must(t, proto.UnmarshalOptions{AllowPartial: true}.Unmarshal(append(first, second...), both))
	if both.GetThreadCore().GetSeccompFilter() != 2 {
		t.Fatalf("the library decodes %v", both)
	}
	dir := filterImages(t)
	image(t, dir, "core-7.img", cores, filtered(0))
	data, err := os.ReadFile(filepath.Join(dir, "core-7.img"))
	testutil.Must(t, err)
	entry := append(first, second...)
	data = append(data[:8:8], byte(len(entry)), 0, 0, 0)
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "core-7.img"), append(data, entry...), 0o600))
	if _, err := criuimages.CheckFilters(verifytest.Open(t, dir), [][]byte{[]byte("good")}); err == nil || !strings.Contains(err.Error(), "another") {
		t.Error(err)
	}
}

// The golden images have the filter of their spec, in the first thread of each process.
func TestGoldenFilters(t *testing.T) {
	t.Parallel()
	for _, version := range verifytest.Versions {
		images := verifytest.Open(t, verifytest.Images(t, version))
		filters, err := criuimages.CheckFilters(images, [][]byte{verifytest.ExpectedOf(t, version).Seccomp})
		testutil.Must(t, err)
		if len(filters) == 0 || filters[1] != 1 {
			t.Errorf("%s: %v", version, filters)
		}
		if _, err := criuimages.CheckFilters(images, nil); err == nil {
			t.Errorf("%s: no filter is permitted, and that of the images is", version)
		}
	}
}

// FuzzCheckFilters replaces images by arbitrary bytes. The result may be anything but a crash.
func FuzzCheckFilters(f *testing.F) {
	images := verifytest.Images(f, verifytest.Versions[0])
	read := func(name string) []byte {
		data, err := os.ReadFile(filepath.Join(images, name))
		testutil.Must(f, err)
		return data
	}
	f.Add(read("seccomp.img"), read("core-1.img"))
	permitted := [][]byte{verifytest.Expected(f).Seccomp}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, filters, core []byte) {
		for name, data := range map[string][]byte{"seccomp.img": filters, "core-1.img": core} {
			testutil.Must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
		}
		_, _ = criuimages.CheckFilters(verifytest.Open(t, dir), permitted)
	})
}
