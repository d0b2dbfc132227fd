package config

import "reflect"

// Changes compares the configuration of a running daemon with a new one. It returns the keys of the
// changed options. reload has the options that the daemon can take at once. restart has those that
// need a restart.
func Changes(running, next *Config) (reload, restart []string) {
	add := func(key string, canReload bool) {
		if canReload {
			reload = append(reload, key)
		} else {
			restart = append(restart, key)
		}
	}
	differs := func(a, b reflect.Value) bool {
		empty := (a.Kind() == reflect.Map || a.Kind() == reflect.Slice) && a.Len() == 0 && b.Len() == 0
		return !empty && !reflect.DeepEqual(a.Interface(), b.Interface())
	}
	for _, o := range options() {
		if differs(o.value(fields(running)), o.value(fields(next))) {
			add(o.Key, o.Reload)
		}
	}
	for _, t := range tables() {
		if differs(fields(running).FieldByIndex(t.field.Index), fields(next).FieldByIndex(t.field.Index)) {
			add(t.Key, t.Reload)
		}
	}
	return reload, restart
}

// Reloaded returns the running daemon's configuration. Options that a daemon can take without a
// restart have the values in next.
func Reloaded(running, next *Config) *Config {
	merged := *running
	for _, o := range options() {
		if o.Reload {
			o.value(fields(&merged)).Set(o.value(fields(next)))
		}
	}
	for _, t := range tables() {
		if t.Reload {
			fields(&merged).FieldByIndex(t.field.Index).Set(fields(next).FieldByIndex(t.field.Index))
		}
	}
	return &merged
}
