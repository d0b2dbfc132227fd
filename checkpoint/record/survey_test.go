package record

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"berth/internal/testutil"
)

// Inspect reports the files that Load would move, and changes nothing.
func TestInspect(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	d := open(t, path, 1)
	newer := open(t, path, 2)
	for _, err := range []error{
		d.Write("good", doc{"text"}), d.Write("refused", doc{"no"}), newer.Write("newer", doc{"text"}),
		os.WriteFile(filepath.Join(path, "bad.record"), []byte("nonsense"), 0o600),
		os.WriteFile(filepath.Join(path, ".good.tmp"), nil, 0o600),
		os.Mkdir(filepath.Join(path, SetAsideDir), 0o700),
		os.WriteFile(filepath.Join(path, SetAsideDir, "old.record.0"), nil, 0o600),
	} {
		testutil.Must(t, err)
	}
	files := func() (all []string) {
		err := filepath.WalkDir(path, func(p string, _ os.DirEntry, err error) error { all = append(all, p); return err })
		testutil.Must(t, err)
		return all
	}
	before := files()
	var got []string
	s, err := Inspect(path, "doc", 1, func(name string, version int, body []byte) error {
		var v doc
		if err := json.Unmarshal(body, &v); err != nil || v.Text == "no" {
			return errors.New("refused")
		}
		got = append(got, name)
		return nil
	})
	testutil.Must(t, err)
	at := func(name string) []string { return []string{filepath.Join(path, name)} }
	if !slices.Equal(got, []string{"good"}) || !slices.Equal(s.Newer, at("newer.record")) ||
		!slices.Equal(s.SetAside, at("set-aside/old.record.0")) || !slices.Equal(s.Other, at(".good.tmp")) {
		t.Errorf("decoded %v, survey %+v", got, s)
	}
	if len(s.Damaged) != 2 || s.Damaged[0].Name != "bad" || !errors.Is(s.Damaged[0].Err, ErrCorrupt) || s.Damaged[1].Name != "refused" || s.Damaged[1].Path != at("refused.record")[0] {
		t.Errorf("damaged: %+v", s.Damaged)
	}
	if !slices.Equal(before, files()) {
		t.Error("the folder was changed")
	}
	for name, damaged := range map[string]int{"good": 0, "none": 0, "bad": 1} {
		s, err := InspectOne(path, name, "doc", 1, func(string, int, []byte) error { return nil })
		if err != nil || len(s.Damaged) != damaged || len(s.SetAside) > 0 {
			t.Errorf("record %s: %+v, %v", name, s, err)
		}
	}
	if s, err := Inspect(filepath.Join(path, "none"), "doc", 1, nil); err != nil || len(s.Damaged) > 0 {
		t.Errorf("missing folder: %+v, %v", s, err)
	}
}
