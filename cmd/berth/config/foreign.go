package config

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// foreign is the configuration of another runtime. Every read marks a setting as known, so that
// the remaining ones can be reported.
type foreign struct {
	name   string
	values map[string]any    // by key, as a list joined by NUL
	notes  map[string]string // settings with a note instead of a counterpart, by key
	read   map[string]bool
}

const keySeparator = "\x00"

func newForeign(name string, content []byte) (foreign, error) {
	var tree map[string]any
	if err := toml.Unmarshal(content, &tree); err != nil {
		return foreign{}, syntaxError(name, err)
	}
	f := foreign{name: name, values: map[string]any{}, notes: map[string]string{}, read: map[string]bool{}}
	f.flatten(tree, nil)
	return f, nil
}

func (f foreign) flatten(tree map[string]any, path []string) {
	for key, value := range tree {
		full := append(slices.Clone(path), key)
		if table, ok := value.(map[string]any); ok {
			f.flatten(table, full)
			continue
		}
		f.values[strings.Join(full, keySeparator)] = value
	}
}

func (f foreign) get(path ...string) (any, bool) {
	key := strings.Join(path, keySeparator)
	f.read[key] = true
	v, ok := f.values[key]
	return v, ok
}

// text returns a string that is not empty.
func (f foreign) text(path ...string) (string, bool) {
	v, _ := f.get(path...)
	s, ok := v.(string)
	return s, ok && s != ""
}

func (f foreign) isTrue(path ...string) bool {
	v, _ := f.get(path...)
	return v == true
}

func (f foreign) setText(to *string, path ...string) {
	if s, ok := f.text(path...); ok {
		*to = s
	}
}

func (f foreign) setNumber(to *int, path ...string) {
	v, _ := f.get(path...)
	if n, ok := v.(int64); ok && n > 0 {
		*to = int(n)
	}
}

func (f foreign) setDuration(to *Duration, path ...string) {
	s, _ := f.text(path...)
	if d, err := time.ParseDuration(s); err == nil && d > 0 {
		to.Duration = d
	}
}

func (f foreign) setList(to *[]string, path ...string) {
	v, _ := f.get(path...)
	list, _ := v.([]any)
	var texts []string
	for _, e := range list {
		if s, ok := e.(string); ok && s != "" {
			texts = append(texts, s)
		}
	}
	if len(texts) > 0 {
		*to = texts
	}
}

// below returns the names of the tables below a table.
func (f foreign) below(path ...string) []string {
	prefix := strings.Join(path, keySeparator) + keySeparator
	var names []string
	for key := range f.values {
		if rest, ok := strings.CutPrefix(key, prefix); ok {
			if name, _, isTable := strings.Cut(rest, keySeparator); isTable && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names
}

// explain adds a note about a setting, or about a table.
func (f foreign) explain(text string, path ...string) { f.notes[dotted(path)] = text }

// note explains a setting, or all settings of a table, if the file has them.
func (f foreign) note(text string, path ...string) {
	key := strings.Join(path, keySeparator)
	for k, v := range f.values {
		if (k == key || strings.HasPrefix(k, key+keySeparator)) && !f.read[k] && !isEmpty(v) {
			f.notes[dotted(path)] = text
			f.read[k] = true
		}
	}
}

// remaining returns the notes, and a line for each setting without a counterpart that has a value.
func (f foreign) remaining() []string {
	var all []string
	for key, note := range f.notes {
		all = append(all, fmt.Sprintf("%s: %s: %s", f.name, key, note))
	}
	for key, value := range f.values {
		if !f.read[key] && !isEmpty(value) {
			all = append(all, fmt.Sprintf("%s: %s: no counterpart in berth", f.name, dotted(strings.Split(key, keySeparator))))
		}
	}
	slices.Sort(all)
	return all
}

// isEmpty reports whether a value is what runtimes print for options that are not set.
func isEmpty(v any) bool {
	switch v := v.(type) {
	case string:
		return v == ""
	case bool:
		return !v
	case int64:
		return v == 0
	case []any:
		return len(v) == 0
	default:
		return false
	}
}

// dotted returns a key as TOML writes it.
func dotted(path []string) string {
	parts := slices.Clone(path)
	for i, p := range parts {
		if strings.ContainsAny(p, ". /") {
			parts[i] = strconv.Quote(p)
		}
	}
	return strings.Join(parts, ".")
}

// setStream sets the address of the streaming server. An empty host is loopback in berth.
func setStream(c *Config, host, port string) {
	if host == "" {
		host = "127.0.0.1"
	}
	if port == "" {
		port = "0"
	}
	c.StreamAddress = net.JoinHostPort(host, port)
}

func (c *Config) addHandler(name string, h Handler) {
	if c.Handlers == nil {
		c.Handlers = map[string]Handler{}
	}
	c.Handlers[name] = h
}

// fromContainerd reads config.toml of containerd 1.x (version 2) and 2.x (version 3 and 4).
func fromContainerd(f foreign) *Config {
	c := Default()
	f.get("version")
	// Version 2 has one CRI plugin; later ones have one for images and one for the runtime.
	images := []string{"plugins", "io.containerd.cri.v1.images"}
	runtime := []string{"plugins", "io.containerd.cri.v1.runtime"}
	server := []string{"plugins", "io.containerd.grpc.v1.cri"}
	if v, _ := f.values["version"].(int64); v < 3 {
		images, runtime = server, server
	}
	at := func(table []string, path ...string) []string { return append(slices.Clone(table), path...) }

	f.setText(&c.LogLevel, "debug", "level")
	f.setText(&c.LogFormat, "debug", "format")
	f.note("set root and state if berth must not use its own directories", "root")
	f.note("set root and state if berth must not use its own directories", "state")
	f.note("berth has a socket of its own: listen", "grpc")

	if path, ok := f.text(at(images, "registry", "config_path")...); ok {
		c.RegistryDirs = strings.Split(path, ":")
	}
	f.note("write it to hosts.toml below registry.config_dirs", at(images, "registry")...)
	f.setNumber(&c.MaxParallelDownloads, at(images, "max_concurrent_downloads")...)
	f.setDuration(&c.StallTimeout, at(images, "image_pull_progress_timeout")...)
	f.note("berth has a built-in pause program; image.pause selects an image", at(images, "sandbox_image")...)
	f.note("berth has a built-in pause program; image.pause selects an image", at(images, "pinned_images", "sandbox")...)
	f.note("image.layer_driver selects the form of layers", at(images, "snapshotter")...)
	f.note("image.layer_driver selects the form of layers", at(runtime, "containerd", "snapshotter")...)

	f.setList(&c.CNIBinDirs, at(runtime, "cni", "bin_dirs")...)
	if dir, ok := f.text(at(runtime, "cni", "bin_dir")...); ok {
		c.CNIBinDirs = []string{dir}
	}
	f.setText(&c.CNIConfDir, at(runtime, "cni", "conf_dir")...)
	f.setNumber(&c.MaxLogLine, at(runtime, "max_container_log_line_size")...)
	if f.isTrue(at(runtime, "ignore_image_defined_volumes")...) {
		c.ImageVolumes = "ignore"
	}
	f.setList(&c.CDISpecDirs, at(runtime, "cdi_spec_dirs")...)
	f.get(at(runtime, "enable_cdi")...)
	f.note("berth uses SELinux if the host does", at(runtime, "enable_selinux")...)
	c.DeviceOwnership = f.isTrue(at(runtime, "device_ownership_from_security_context")...)
	containerdHandlers(f, c, at(runtime, "containerd"))
	host, _ := f.text(at(server, "stream_server_address")...)
	port, _ := f.text(at(server, "stream_server_port")...)
	if f.isTrue(at(server, "enable_tls_streaming")...) {
		setStream(c, host, port)
		f.setText(&c.StreamTLSCert, at(server, "x509_key_pair_streaming", "tls_cert_file")...)
		f.setText(&c.StreamTLSKey, at(server, "x509_key_pair_streaming", "tls_key_file")...)
	}
	f.setDuration(&c.StreamIdleTimeout, at(server, "stream_idle_timeout")...)

	nri := []string{"plugins", "io.containerd.nri.v1.nri"}
	c.NRI = !f.isTrue(at(nri, "disable")...)
	f.setText(&c.NRISocket, at(nri, "socket_path")...)
	f.setText(&c.NRIPluginDir, at(nri, "plugin_path")...)
	f.setText(&c.NRIPluginConfigDir, at(nri, "plugin_config_path")...)
	f.setDuration(&c.NRIRegistrationTimeout, at(nri, "plugin_registration_timeout")...)
	f.setDuration(&c.NRIRequestTimeout, at(nri, "plugin_request_timeout")...)
	return c
}

// containerdHandlers reads the runtimes. runc with its default program is the built-in runtime.
func containerdHandlers(f foreign, c *Config, table []string) {
	at := func(path ...string) []string { return append(slices.Clone(table), path...) }
	for _, name := range f.below(at("runtimes")...) {
		entry := at("runtimes", name)
		kind, _ := f.text(append(slices.Clone(entry), "runtime_type")...)
		path, _ := f.text(append(slices.Clone(entry), "options", "BinaryName")...)
		if f.isTrue(append(slices.Clone(entry), "options", "SystemdCgroup")...) {
			c.CgroupDriver = "systemd"
		}
		switch {
		case kind != "" && kind != "io.containerd.runc.v2":
			f.explain("only runtimes with runc's command line become handlers, not shims like "+kind, entry...)
		case strings.HasPrefix(path, "/") && !strings.HasSuffix(path, "/runc"):
			c.addHandler(name, Handler{Path: path})
		case path != "" && path != "runc" && !strings.HasSuffix(path, "/runc"):
			f.explain(fmt.Sprintf("write the absolute path of %s as [handlers.%s]", path, name), entry...)
		case name != "runc":
			c.addHandler(name, Handler{})
		}
	}
	if name, ok := f.text(at("default_runtime_name")...); ok {
		if _, known := c.Handlers[name]; known {
			c.DefaultHandler = name
		}
	}
}

// fromCRIO reads crio.conf or a file of crio.conf.d.
func fromCRIO(f foreign) *Config {
	c := Default()
	f.note("set root and state if berth must not use its own directories", "crio", "root")
	f.note("set root and state if berth must not use its own directories", "crio", "runroot")
	f.note("berth has a socket of its own: listen", "crio", "api", "listen")
	f.note("berth has layers of its own: image.layer_driver", "crio", "storage_driver")
	f.note("berth has layers of its own: image.layer_driver", "crio", "storage_option")

	host, _ := f.text("crio", "api", "stream_address")
	port, _ := f.text("crio", "api", "stream_port")
	if f.isTrue("crio", "api", "stream_enable_tls") {
		setStream(c, host, port)
		f.setText(&c.StreamTLSCert, "crio", "api", "stream_tls_cert")
		f.setText(&c.StreamTLSKey, "crio", "api", "stream_tls_key")
		f.setText(&c.StreamClientCA, "crio", "api", "stream_tls_ca")
	}
	f.setDuration(&c.StreamIdleTimeout, "crio", "api", "stream_idle_timeout")

	crioRuntime(f, c)
	crioHandlers(f, c)

	f.note("berth has a built-in pause program; image.pause selects an image", "crio", "image", "pause_image")
	f.get("crio", "image", "pause_command")
	f.setText(&c.DockerConfig, "crio", "image", "global_auth_file")
	if volumes, _ := f.text("crio", "image", "image_volumes"); volumes == "ignore" {
		c.ImageVolumes = volumes
	}
	f.setList(&c.PinnedImages, "crio", "image", "pinned_images")
	f.setDuration(&c.StallTimeout, "crio", "image", "pull_progress_timeout")

	f.setText(&c.CNIConfDir, "crio", "network", "network_dir")
	f.setList(&c.CNIBinDirs, "crio", "network", "plugin_dirs")

	if f.isTrue("crio", "tracing", "enable_tracing") {
		f.setText(&c.TracingEndpoint, "crio", "tracing", "tracing_endpoint")
		f.setNumber(&c.TracingSamplingRate, "crio", "tracing", "tracing_sampling_rate_per_million")
	}
	crioNRI(f, c)
	return c
}

// crioRuntime reads the table crio.runtime without the runtimes.
func crioRuntime(f foreign, c *Config) {
	level, _ := f.text("crio", "runtime", "log_level")
	if level = map[string]string{"trace": "debug", "debug": "debug", "warn": "warn", "error": "error", "fatal": "error",
		"panic": "error"}[level]; level != "" {
		c.LogLevel = level
	}
	f.setText(&c.CgroupDriver, "crio", "runtime", "cgroup_manager")
	f.setText(&c.NetNSDir, "crio", "runtime", "namespaces_dir")
	f.setList(&c.CDISpecDirs, "crio", "runtime", "cdi_spec_dirs")
	c.DeviceOwnership = f.isTrue("crio", "runtime", "device_ownership_from_security_context")
	f.note("kubelet's podPidsLimit limits processes", "crio", "runtime", "pids_limit")
	f.note("kubelet's containerLogMaxSize limits logs", "crio", "runtime", "log_size_max")
	f.note("berth uses SELinux if the host does", "crio", "runtime", "selinux")
	f.note("monitors are part of berth", "crio", "runtime", "conmon")
	f.note("monitors are part of berth", "crio", "runtime", "conmon_cgroup")
}

// crioHandlers reads the runtimes. runc is the built-in runtime.
func crioHandlers(f foreign, c *Config) {
	for _, name := range f.below("crio", "runtime", "runtimes") {
		path, _ := f.text("crio", "runtime", "runtimes", name, "runtime_path")
		kind, _ := f.text("crio", "runtime", "runtimes", name, "runtime_type")
		for _, known := range []string{
			"runtime_root", "monitor_path", "monitor_cgroup", "monitor_env", "monitor_exec_cgroup",
		} {
			f.get("crio", "runtime", "runtimes", name, known)
		}
		switch {
		case kind == "vm":
			f.explain("only runtimes with runc's command line become handlers", "crio", "runtime", "runtimes", name)
		case path == "" && name != "runc":
			f.explain("write its absolute path as [handlers."+name+"]", "crio", "runtime", "runtimes", name)
		case name != "runc":
			c.addHandler(name, Handler{Path: path})
		}
	}
	if name, ok := f.text("crio", "runtime", "default_runtime"); ok {
		if _, known := c.Handlers[name]; known {
			c.DefaultHandler = name
		}
	}
}

// crioNRI reads the table crio.nri.
func crioNRI(f foreign, c *Config) {
	if v, ok := f.get("crio", "nri", "enable_nri"); ok {
		c.NRI = v == true
	}
	f.setText(&c.NRISocket, "crio", "nri", "nri_listen")
	f.setText(&c.NRIPluginDir, "crio", "nri", "nri_plugin_dir")
	f.setText(&c.NRIPluginConfigDir, "crio", "nri", "nri_plugin_config_dir")
	f.setDuration(&c.NRIRegistrationTimeout, "crio", "nri", "nri_plugin_registration_timeout")
	f.setDuration(&c.NRIRequestTimeout, "crio", "nri", "nri_plugin_request_timeout")
}
