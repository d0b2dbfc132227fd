package proto

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestDecodeProcesses(t *testing.T) {
	for _, s := range []PIDs{
		{},
		{MonitorPID: 12, MonitorStartTime: 34},
		{MonitorPID: math.MaxInt32, MonitorStartTime: math.MaxUint64, InitPID: 7, InitStartTime: 9, StartedAt: time.Unix(0, math.MaxInt64)},
		{MonitorPID: 12, MonitorStartTime: 34, InitPID: 56, InitStartTime: 78, ContainerPID: 90},
	} {
		if got, err := DecodePIDs(s.Encode()); got != s || err != nil {
			t.Errorf("DecodePIDs(%q) = %+v, %v", s.Encode(), got, err)
		}
	}
	for _, bad := range []string{"", "\n", "1 2 3 4 5", "1 2 3 4\n", "1 2 3 4 5 6 7\n", "-1 2 3 4 5\n", "1 -2 3 4 5\n", "x 2 3 4 5\n", "99999999999 2 3 4 5\n"} {
		if got, err := DecodePIDs([]byte(bad)); err == nil {
			t.Errorf("DecodePIDs(%q) = %+v, want an error", bad, got)
		}
	}
}

func TestDecodeExit(t *testing.T) {
	for _, e := range []Exit{
		{At: time.Unix(0, 0)},
		{Code: 137, Signal: 9, OOMKilled: true, At: time.Unix(0, math.MaxInt64)},
		{Code: 255, At: time.Unix(0, 1)},
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

func FuzzDecodeRecords(f *testing.F) {
	f.Add(Exit{Code: 1, At: time.Unix(0, 1)}.Encode())
	f.Add(PIDs{MonitorPID: 1}.Encode())
	f.Fuzz(func(t *testing.T, data []byte) {
		if e, err := DecodeExit(data); err == nil && string(e.Encode()) != string(data) {
			t.Errorf("DecodeExit(%q) = %+v", data, e)
		}
		if s, err := DecodePIDs(data); err == nil {
			if again, err := DecodePIDs(s.Encode()); again != s || err != nil {
				t.Errorf("DecodePIDs(%q) = %+v, again %+v, %v", data, s, again, err)
			}
		}
	})
}

func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	for _, content := range []string{"a longer first version\n", "second\n"} {
		if err := WriteFile(dir, "file", []byte(content)); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(dir, "file")); string(got) != content || err != nil {
			t.Errorf("read %q, %v", got, err)
		}
	}
	if entries, err := os.ReadDir(dir); len(entries) != 1 || err != nil {
		t.Errorf("left in the directory: %v, %v", entries, err)
	}
	if err := WriteFile(filepath.Join(dir, "missing"), "file", nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("WriteFile into a missing directory = %v", err)
	}
}
