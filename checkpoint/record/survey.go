package record

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Survey lists the files in a folder of records that are not valid records. [Inspect] returns it.
type Survey struct {
	Damaged  []Damaged // files that the next Load would move to SetAsideDir, with their present paths
	Newer    []string  // files of a newer berth, for which Load fails
	SetAside []string  // files that Load has moved to SetAsideDir
	Other    []string  // other files
}

// Inspect reads the records of a folder like [Dir.Load] but changes nothing. A daemon may use the
// folder at the same time: it leaves out files that disappear during the call. A missing folder
// counts as empty.
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

// InspectOne is [Inspect] for the record of one name. A missing record leaves the survey empty.
func InspectOne(path, name, kind string, version int,
	decode func(name string, version int, body []byte) error) (s Survey, err error) {
	if err := checkName(name); err != nil {
		return s, err
	}
	err = s.inspect(filepath.Join(path, name+suffix), name, kind, version, decode)
	return s, err
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
		return fmt.Errorf("list damaged records: %w", err)
	}
	for _, e := range entries {
		s.SetAside = append(s.SetAside, filepath.Join(dir, e.Name()))
	}
	return nil
}
