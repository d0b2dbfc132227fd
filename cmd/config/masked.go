package config

import (
	"reflect"
	"slices"
)

// Masked returns the options by key for a bug report. Numbers, switches, paths and values from a
// list are unchanged. Every other text is passed through mask.
func (c *Config) Masked(mask func(string) string) map[string]any {
	all := maskedOptions(options(), fields(c), mask)
	for _, t := range tables() {
		entries := fields(c).FieldByIndex(t.field.Index)
		for _, name := range sortedKeys(entries) {
			all[t.Key+"."+name.String()] = maskedOptions(t.Options, entries.MapIndex(name), mask)
		}
	}
	return all
}

func maskedOptions(of []option, values reflect.Value, mask func(string) string) map[string]any {
	all := make(map[string]any, len(of))
	for _, o := range of {
		value := o.value(values).Interface()
		if o.path == "" && o.oneof == nil {
			switch v := value.(type) {
			case string:
				value = mask(v)
			case []string:
				masked := slices.Clone(v)
				for i := range masked {
					masked[i] = mask(v[i])
				}
				value = masked
			}
		}
		all[o.Key] = value
	}
	return all
}

// Paths returns the values of all options that are paths.
func (c *Config) Paths() []string {
	var all []string
	for _, o := range options() {
		if o.path == "" {
			continue
		}
		switch v := o.value(fields(c)).Interface().(type) {
		case string:
			all = append(all, v)
		case []string:
			all = append(all, v...)
		}
	}
	return all
}
