package config

import (
	"slices"
	"strings"

	nearestname "berth/internal/nearest"
)

// groups are the tables of options, in the order of the options. The first is "", for the options
// outside of tables.
func groups() []string {
	all := []string{""}
	for _, o := range options() {
		if group, _ := o.group(); !slices.Contains(all, group) {
			all = append(all, group)
		}
	}
	return all
}

func isGroup(key string) bool { return key != "" && slices.Contains(groups(), key) }

// keysBelow returns the keys of the options in a table.
func keysBelow(group string) []string {
	var all []string
	for _, o := range options() {
		if g, key := o.group(); g == group {
			all = append(all, key)
		}
	}
	return all
}

// nearest returns the option or table with the key nearest to key. A key in the wrong table is
// close to the option of the same name in another table.
func nearest(key string) string {
	known := append(keysOf(options()), groups()[1:]...)
	for _, t := range tables() {
		known = append(known, t.Key)
	}
	_, name := cut(key)
	for _, o := range options() {
		if _, own := o.group(); own == name || o.Old == name {
			return o.Key
		}
	}
	return nearestOf(key, known)
}

// cut splits a key at its last dot.
func cut(key string) (table, name string) {
	if i := strings.LastIndexByte(key, '.'); i >= 0 {
		return key[:i], key[i+1:]
	}
	return "", key
}

func keysOf(options []option) []string {
	var all []string
	for _, o := range options {
		all = append(all, o.Key)
	}
	return all
}

// nearestOf returns the known key with the smallest edit distance from key. If the key has no
// table, the tables of known keys are ignored.
func nearestOf(key string, known []string) string {
	best, least := "", -1
	for _, k := range known {
		compared := k
		if !strings.Contains(key, ".") {
			_, compared = cut(k)
		}
		// network_type means network.type.
		d := min(nearestname.Distance(key, compared), nearestname.Distance(key, strings.ReplaceAll(k, ".", "_")))
		if least < 0 || d < least {
			best, least = k, d
		}
	}
	return best
}
