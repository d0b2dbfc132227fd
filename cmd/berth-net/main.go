// Command berth-net is berth's own network as a CNI plugin for any runtime that executes plugins.
// Install it as /opt/cni/bin/berth-net. berth itself calls the plugin as a function.
package main

import "berth/cni/berthnet"

func main() { berthnet.Main() }
