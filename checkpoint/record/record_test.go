package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

type doc struct{ Text string }

func open(t *testing.T, dir string, version int) *Dir {
	t.Helper()
	d, err := OpenDir(dir, "doc", version, Power)
	testutil.Must(t, err)
	return d
}

func load(t *testing.T, d *Dir) (map[string]string, []Damaged) {
	t.Helper()
	got := map[string]string{}
	bad, err := d.Load(func(name string, _ int, body []byte) error {
		var v doc
		if err := json.Unmarshal(body, &v); err != nil {
			return err
		}
		got[name] = v.Text
		return nil
	})
	testutil.Must(t, err)
	return got, bad
}

func TestWriteLoadRemove(t *testing.T) {
	t.Parallel()
	d := open(t, t.TempDir(), 1)
	for _, text := range []string{"first", "second, longer", "3"} {
		testutil.Must(t, d.Write("a", doc{text}))
		if got, bad := load(t, d); got["a"] != text || len(got) != 1 || bad != nil {
			t.Fatalf("after writing %q: %v, damaged %v", text, got, bad)
		}
	}
	for range 2 {
		testutil.Must(t, d.Remove("a"))
	}
	if got, _ := load(t, d); len(got) != 0 {
		t.Fatalf("after removal: %v", got)
	}
}

func TestInvalidNamesAreRefused(t *testing.T) {
	t.Parallel()
	d := open(t, t.TempDir(), 1)
	for _, name := range []string{"", ".", "..", "a/b", "../a", ".hidden", "a\x00b"} {
		if err := d.Write(name, doc{}); err == nil {
			t.Errorf("Write(%q) succeeded", name)
		}
		if err := d.Remove(name); err == nil {
			t.Errorf("Remove(%q) succeeded", name)
		}
	}
}

func TestDamagedRecordIsMoved(t *testing.T) {
	t.Parallel()
	cases := map[string]func([]byte) []byte{
		"empty":       func([]byte) []byte { return nil },
		"truncated":   func(b []byte) []byte { return b[:len(b)-1] },
		"no body":     func(b []byte) []byte { return b[:bytes.IndexByte(b, '\n')] },
		"flipped bit": func(b []byte) []byte { b[len(b)-3] ^= 1; return b },
		"other kind":  func(b []byte) []byte { return bytes.Replace(b, []byte(" doc "), []byte(" pod "), 1) },
		"zeroes":      func(b []byte) []byte { return make([]byte, len(b)) },
	}
	for name, damage := range cases {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			d := open(t, dir, 1)
			for _, n := range []string{"good", "bad"} {
				testutil.Must(t, d.Write(n, doc{n}))
			}
			path := filepath.Join(dir, "bad"+suffix)
			data, err := os.ReadFile(path)
			testutil.Must(t, err)
			damaged := damage(data)
			testutil.Must(t, os.WriteFile(path, damaged, 0o600))
			got, bad := load(t, d)
			if len(got) != 1 || got["good"] != "good" {
				t.Errorf("loaded %v", got)
			}
			if len(bad) != 1 || bad[0].Name != "bad" || bad[0].Err == nil {
				t.Fatalf("damaged: %+v", bad)
			}
			if kept, err := os.ReadFile(bad[0].Path); err != nil || !bytes.Equal(kept, damaged) {
				t.Errorf("the damaged file is missing: %v", err)
			}
			if _, bad := load(t, d); bad != nil {
				t.Errorf("moved twice: %+v", bad)
			}
		})
	}
}

func TestNewerVersionIsNotLost(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	testutil.Must(t, open(t, dir, 2).Write("a", doc{"x"}))
	bad, err := open(t, dir, 1).Load(func(string, int, []byte) error { return nil })
	if err == nil || bad != nil || !strings.Contains(err.Error(), "newer berth") {
		t.Fatalf("%v, %v", bad, err)
	}
	if got, _ := load(t, open(t, dir, 2)); got["a"] != "x" {
		t.Errorf("the record is missing: %v", got)
	}
}

func TestFullDiskIsResourceExhausted(t *testing.T) {
	t.Parallel()
	d := open(t, t.TempDir(), 1)
	testutil.Must(t, os.Symlink("/dev/full", filepath.Join(d.path, ".a.tmp")))
	if err := d.Write("a", doc{"x"}); errdefs.Code(err) != codes.ResourceExhausted {
		t.Errorf("got %v", err)
	}
	if got, _ := load(t, d); len(got) != 0 {
		t.Errorf("an incomplete record was loaded: %v", got)
	}
}

func TestRecordRefusedByDecoderIsMoved(t *testing.T) {
	t.Parallel()
	d := open(t, t.TempDir(), 1)
	for n := range 2 { // the second file must not overwrite the first
		testutil.Must(t, d.Write("a", doc{strings.Repeat("x", n)}))
		bad, err := d.Load(func(string, int, []byte) error { return errors.New("no") })
		if err != nil || len(bad) != 1 {
			t.Fatalf("%v, %v", bad, err)
		}
	}
	kept, err := os.ReadDir(filepath.Join(d.path, SetAsideDir))
	if err != nil || len(kept) != 2 {
		t.Fatalf("%d files moved, %v", len(kept), err)
	}
}

func TestTemporaryFileIsRemoved(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	d := open(t, dir, 1)
	tmp := filepath.Join(dir, ".a.tmp")
	testutil.Must(t, os.WriteFile(tmp, []byte("half"), 0o600))
	if got, bad := load(t, d); len(got) != 0 || bad != nil {
		t.Fatalf("%v %v", got, bad)
	}
	if _, err := os.Lstat(tmp); !os.IsNotExist(err) {
		t.Fatalf("the temporary file remains: %v", err)
	}
}

// Records of versions up to 0.2.0 are read, and a damaged body is detected.
func TestFirstFormatIsRead(t *testing.T) {
	t.Parallel()
	const body = `{"a":"b"}`
	header := headerOf(firstMagic, "doc", 3, []byte(body))
	if version, got, err := Decode("doc", []byte(header+body)); version != 3 || string(got) != body || err != nil {
		t.Errorf("Decode = %d, %q, %v", version, got, err)
	}
	if _, _, err := Decode("doc", []byte(header+`{"a":"c"}`)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("Decode of a damaged record: %v", err)
	}
}

// FuzzDecode checks that accepted content is exactly what Encode writes.
func FuzzDecode(f *testing.F) {
	good, err := Encode("doc", 1, doc{"x"})
	testutil.Must(f, err)
	f.Add(good, false)
	f.Add([]byte(headerOf(firstMagic, "doc", 1, []byte("{}"))+"{}"), false)
	f.Add(bytes.Replace(good, []byte(" 1 "), []byte(" +1  "), 1), false)
	f.Add([]byte("berth-record doc 1 -1 x\n"), false)
	f.Add([]byte("berth-record doc 1 2 \n{}"), true)
	f.Add([]byte(`{"a":"b"}`), true)
	f.Fuzz(func(t *testing.T, data []byte, bodyOnly bool) {
		if bodyOnly { // a fuzzer cannot guess the sum
			data = append([]byte(headerOf(magic, "doc", 7, data)), data...)
		}
		version, body, err := Decode("doc", data)
		switch {
		case err == nil && headerOf(strings.Fields(string(data))[0], "doc", version, body)+string(body) != string(data):
			t.Fatalf("version %d, body %q", version, body)
		case err != nil && bodyOnly:
			t.Fatal(err)
		case err != nil && !errors.Is(err, ErrCorrupt):
			t.Fatalf("error is not ErrCorrupt: %v", err)
		}
		if bytes.HasPrefix(data, []byte(firstMagic+" ")) {
			return // the sum does not cover the header
		}
		for bit := range 8 * min(len(data), 64) {
			data[bit/8] ^= 1 << (bit % 8)
			if _, _, e := Decode("doc", data); err == nil && e == nil {
				t.Fatalf("accepted with bit %d flipped", bit)
			}
			data[bit/8] ^= 1 << (bit % 8)
		}
	})
}

// FuzzLoad puts an arbitrary file beside a valid record. Load returns the valid record and keeps
// the other file.
func FuzzLoad(f *testing.F) {
	good, err := Encode("doc", 1, doc{"x"})
	testutil.Must(f, err)
	newer, err := Encode("doc", 9, doc{"x"})
	testutil.Must(f, err)
	f.Add("b.record", good)
	f.Add("b.record", newer)
	f.Add("b.record", []byte("{}"))
	f.Add(".b.tmp", good[:10])
	f.Add("set-aside", []byte{})
	f.Add("..record", good)
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		d := open(t, t.TempDir(), 1)
		testutil.Must(t, d.Write("good", doc{"kept"}))
		path := filepath.Join(d.path, name)
		if filepath.Dir(path) != d.path || name == "good.record" || os.WriteFile(path, data, 0o600) != nil {
			t.Skip("no name of a file")
		}
		for range 2 { // the second Load finds nothing new
			got := map[string]string{}
			bad, err := d.Load(func(name string, _ int, body []byte) error {
				got[name] = string(body)
				return nil
			})
			if len(bad) > 1 || err == nil && got["good"] == "" {
				t.Fatalf("got %v, damaged %v", got, bad)
			}
			if err != nil && !strings.Contains(err.Error(), "newer berth") && name != SetAsideDir {
				t.Fatal(err)
			}
			if len(bad) == 1 {
				path = bad[0].Path
			}
		}
		kept, err := os.ReadFile(path)
		if leftover := strings.HasPrefix(name, ".") && strings.HasSuffix(name, ".tmp"); leftover != errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		} else if !leftover && !bytes.Equal(kept, data) {
			t.Fatalf("its content is now %q", kept)
		}
	})
}
