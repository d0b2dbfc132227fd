package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Survey is what a folder of records has beside the records that can be used.
type Survey struct {
	Damaged  []Damaged // would be set aside by the next Load; Path is where they are now
	Newer    []string  // files of a newer berth, which keep this one from starting
	SetAside []string  // files that a Load has set aside
	Other    []string  // files that are no records
}

// Inspect reads the records of a folder as Load does, in whose place a daemon may be using
// it, and changes nothing. A folder that does not exist is empty. What vanishes
// meanwhile is left out.
func Inspect(path, kind string, version int, decode func(name string, version int, body []byte) error) (Survey, error) {
	var s Survey
	entries, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, fmt.Errorf("read record folder %s: %w", path, err)
	}
	for _, e := range entries {
		file := filepath.Join(path, e.Name())
		name, isRecord := strings.CutSuffix(e.Name(), suffix)
		switch {
		case e.IsDir() && e.Name() == SetAsideDir:
			if err := s.addSetAside(file); err != nil {
				return s, err
			}
		case isRecord && !e.IsDir():
			if err := s.inspect(file, name, kind, version, decode); err != nil {
				return s, err
			}
		default:
			s.Other = append(s.Other, file)
		}
	}
	return s, nil
}

func (s *Survey) inspect(file, name, kind string, newest int, decode func(string, int, []byte) error) error {
	data, err := readCapped(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil && !errors.Is(err, ErrCorrupt) {
		return fmt.Errorf("read %s record %s: %w", kind, name, err)
	}
	var version int
	var body []byte
	if err == nil {
		version, body, err = Decode(kind, data)
	}
	switch {
	case err == nil && version > newest:
		s.Newer = append(s.Newer, file)
		return nil
	case err == nil:
		err = decode(name, version, body)
	}
	if err != nil {
		s.Damaged = append(s.Damaged, Damaged{Name: name, Path: file, Err: err})
	}
	return nil
}

func (s *Survey) addSetAside(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read records set aside: %w", err)
	}
	for _, e := range entries {
		s.SetAside = append(s.SetAside, filepath.Join(dir, e.Name()))
	}
	return nil
}
