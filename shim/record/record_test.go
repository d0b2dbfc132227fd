package record

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestShim(t *testing.T) {
	for _, s := range []Shim{
		{},
		{PID: 12, Start: 34},
		{PID: math.MaxInt32, Start: math.MaxUint64, InitPID: 7, InitStart: 9, StartedAt: math.MaxInt64},
	} {
		if got, err := DecodeShim(s.Encode()); got != s || err != nil {
			t.Errorf("DecodeShim(%q) = %+v, %v", s.Encode(), got, err)
		}
	}
	for _, bad := range []string{"", "\n", "1 2 3 4 5", "1 2 3 4\n", "1 2 3 4 5 6\n", "-1 2 3 4 5\n", "1 -2 3 4 5\n", "x 2 3 4 5\n", "99999999999 2 3 4 5\n"} {
		if got, err := DecodeShim([]byte(bad)); err == nil {
			t.Errorf("DecodeShim(%q) = %+v, want an error", bad, got)
		}
	}
}

func TestExit(t *testing.T) {
	for _, e := range []Exit{
		{},
		{Code: 137, Signal: 9, OOMKilled: true, At: math.MaxInt64},
		{Code: 255, At: 1},
	} {
		data := e.Encode()
		if got, err := DecodeExit(data); got != e || err != nil {
			t.Errorf("DecodeExit(%q) = %+v, %v", data, got, err)
		}
		for i := range data {
			torn := append([]byte(nil), data...)
			torn[i] ^= 1
			if got, err := DecodeExit(torn); err == nil {
				t.Errorf("DecodeExit(%q) = %+v, want an error: byte %d was changed", torn, got, i)
			}
			if got, err := DecodeExit(data[:i]); err == nil {
				t.Errorf("DecodeExit(%q) = %+v, want an error: it is cut", data[:i], got)
			}
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(Exit{Code: 1}.Encode())
	f.Add(Shim{PID: 1}.Encode())
	f.Fuzz(func(t *testing.T, data []byte) {
		if e, err := DecodeExit(data); err == nil && string(e.Encode()) != string(data) {
			t.Errorf("DecodeExit(%q) = %+v", data, e)
		}
		if s, err := DecodeShim(data); err == nil {
			if again, err := DecodeShim(s.Encode()); again != s || err != nil {
				t.Errorf("DecodeShim(%q) = %+v, again %+v, %v", data, s, again, err)
			}
		}
	})
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	for _, content := range []string{"a longer first version\n", "second\n"} {
		if err := Write(dir, "file", []byte(content)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(dir, "file")); string(got) != content || err != nil {
			t.Errorf("read %q, %v", got, err)
		}
	}
	if entries, err := os.ReadDir(dir); len(entries) != 1 || err != nil {
		t.Errorf("left in the directory: %v, %v", entries, err)
	}
	if err := Write(filepath.Join(dir, "missing"), "file", nil); !errors.Is(err, unix.ENOENT) {
		t.Errorf("Write into a missing directory = %v", err)
	}
}
